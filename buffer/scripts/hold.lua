-- hold: take up a lease that the server forgot, because it was killed before it had written it down.
-- Invariant: what the learner holds is leased to nobody else. The groups are the lease's, wherever they are now; those
-- that are forgotten altogether are trained all the same and, like everything that is forgotten, counted nowhere.
-- Idempotent and fenced.
-- ARGV: epoch, version of the lease, its id, its number of shards, then group and shard of each of its groups
local refused = refuse(ARGV[1])
if refused then
  return refused
end
if redis.call('LPOS', prefix .. 'closed', ARGV[3]) then
  return {'ok'} -- it was acked meanwhile
end
local version = ARGV[2]
local record = {id = ARGV[3], counts = {}}
for k = 1, tonumber(ARGV[4]) do
  record.counts[k] = 0
end
for at = 5, #ARGV, 2 do
  local group, shard = ARGV[at], tonumber(ARGV[at + 1])
  local key = group_key(group)
  if redis.call('EXISTS', key) == 1 and redis.call('HEXISTS', key, 'settled') == 0 then
    leave(group)
    redis.call('ZADD', leased, version, group)
    redis.call('HSET', key, 'shard', shard)
    redis.call('HSETNX', key, 'oldest', version)
    redis.call('HSETNX', key, 'place', redis.call('HGET', key, 'ticket'))
    record.counts[shard + 1] = record.counts[shard + 1] + 1
  end
end
redis.call('HSET', leases, version, cjson.encode(record))
return {'ok'}
