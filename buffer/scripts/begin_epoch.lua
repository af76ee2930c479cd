-- begin_epoch: a new learner gang takes over.
-- Invariant: at most one epoch is current. Whatever an older one still held is redelivered, and whatever it
-- still calls is refused, so no group is trained by two gangs. A step is never redelivered by a clock.
-- Idempotent: a call that is repeated, or arrives late, does not fence off the epoch that it began.
-- ARGV: who it is, for people; a name of this call; number that the epoch had on a server that forgot it (0: none)
if not is_open() then
  return {'not_open'}
end
if redis.call('HGET', control, 'begun') == ARGV[2] then
  return {'ok', number('epoch'), number('acks')}
end
local forgotten = tonumber(ARGV[3])
if forgotten > 0 and number('epoch') >= forgotten then
  return {'fenced', number('epoch')}
end
local epoch = math.max(number('epoch') + 1, forgotten)
redeliver(redis.call('ZRANGE', leased, 0, -1))
redis.call('DEL', leases)
redis.call('HSET', control, 'holder', ARGV[1], 'begun', ARGV[2], 'epoch', epoch)
return {'ok', epoch, number('acks')}
