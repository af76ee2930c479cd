-- release: the learner gives a lease back untrained.
-- Invariant: its groups are ready again in their old places and are counted nowhere. Idempotent and fenced.
-- ARGV: epoch, version of the lease, its id
local refused = refuse(ARGV[1])
if refused then
  return refused
end
local stored = redis.call('HGET', leases, ARGV[2])
if stored and cjson.decode(stored).id == ARGV[3] then
  redeliver(redis.call('ZRANGEBYSCORE', leased, ARGV[2], ARGV[2]))
  redis.call('HDEL', leases, ARGV[2])
end
return {'ok'}
