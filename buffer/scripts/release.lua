-- release: the learner gives a lease back untrained.
-- Invariant: its groups are ready again in their old places and are counted nowhere. Idempotent and fenced.
-- ARGV: epoch, version of the lease
local refused = refuse(ARGV[1])
if refused then
  return refused
end
redeliver(redis.call('ZRANGEBYSCORE', leased, ARGV[2], ARGV[2]))
return {'ok'}
