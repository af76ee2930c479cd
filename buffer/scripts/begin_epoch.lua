-- begin_epoch: a new learner gang takes over.
-- Invariant: at most one epoch is current. Whatever an older one still held is redelivered, and whatever it
-- still calls is refused, so no group is trained by two gangs. A step is never redelivered by a clock.
-- Idempotent: a call that is repeated, or arrives late, does not fence off the epoch that it began.
-- ARGV: who it is, for people; a name of this call
if not is_open() then
  return {'not_open'}
end
if redis.call('HGET', control, 'begun') == ARGV[2] then
  return {'ok', number('epoch')}
end
redeliver(redis.call('ZRANGE', leased, 0, -1))
redis.call('DEL', leases)
redis.call('HSET', control, 'holder', ARGV[1], 'begun', ARGV[2])
return {'ok', redis.call('HINCRBY', control, 'epoch', 1)}
