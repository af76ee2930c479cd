-- release: the learner gives a lease back untrained.
-- Invariant: its groups are ready again in their old places and are counted nowhere. Idempotent and fenced.
-- ARGV: epoch, known, entry; version of the lease, its id
local refused = refuse()
if refused then
  return refused
end
if is_done() then
  return {'ok'}
end
local stored = redis.call('HGET', leases, ARGV[4])
if stored and cjson.decode(stored).id == ARGV[5] then
  redeliver(redis.call('ZRANGEBYSCORE', leased, ARGV[4], ARGV[4]))
  redis.call('HDEL', leases, ARGV[4])
end
enter()
return {'ok'}
