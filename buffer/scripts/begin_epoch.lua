-- begin_epoch: a new learner gang takes over.
-- Invariant: at most one epoch is current. Whatever an older one still held is redelivered, and whatever it
-- still calls is refused, so no group is trained by two gangs. A step is never redelivered by a clock.
-- Idempotent: a call that is repeated, or arrives late, does not fence off the epoch that it began.
-- ARGV: number that the epoch has and the server may have forgotten (0: a new one), '', entry; who it is, for people
if not is_open() then
  return {'not_open'}
end
local forgotten, current = tonumber(ARGV[1]), number('epoch')
if is_done() then
  return {'ok', current}
elseif forgotten > 0 and current >= forgotten then
  return {'fenced', current}
end
local epoch = math.max(current + 1, forgotten)
redeliver(redis.call('ZRANGE', leased, 0, -1))
redis.call('DEL', leases, journal)
redis.call('HSET', control, 'epoch', epoch, 'holder', ARGV[4])
enter()
return {'ok', epoch}
