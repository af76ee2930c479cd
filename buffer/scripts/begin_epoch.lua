-- begin_epoch: a new learner gang takes over.
-- Invariant: at most one epoch is current. Whatever an older one still held is redelivered, and whatever it
-- still calls is refused, so no group is trained by two gangs. A step is never redelivered by a clock.
-- ARGV: who it is, for people
if not is_open() then
  return {'not_open'}
end
redeliver(redis.call('ZRANGE', leased, 0, -1))
redis.call('DEL', leases)
redis.call('HSET', control, 'holder', ARGV[1])
return {'ok', redis.call('HINCRBY', control, 'epoch', 1)}
