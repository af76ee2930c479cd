-- ack: the learner has trained on a batch and published the weights that came of it.
-- Invariant: consuming the groups, freeing their slots and raising the version are one step, so a slot admitted
-- after it is sampled with the new weights. Exactly once: all groups of the lease or none; a repeated ack changes
-- nothing. Only the current epoch may ack.
-- ARGV: epoch, known, entry; version of the lease, its id, new version
local refused = refuse()
if refused then
  return refused
end
local id, version = ARGV[5], tonumber(ARGV[6])
if is_done() then
  return {'ok'}
end
local stored = redis.call('HGET', leases, ARGV[4])
local record = stored and cjson.decode(stored) or {}
if record.id ~= id then
  return {'over'}
end
local groups, size = redis.call('ZRANGEBYSCORE', leased, ARGV[4], ARGV[4]), 0
for _, of_shard in ipairs(record.counts) do
  size = size + of_shard
end
if #groups < size or record.condemned then
  return {'incomplete'}
end
redis.call('HDEL', leases, ARGV[4])

if limits.max_uses > 1 then -- what is used again stays in order
  local places = {}
  for _, group in ipairs(groups) do
    places[group] = tonumber(redis.call('HGET', group_key(group), 'place')) or 0
  end
  table.sort(groups, function(a, b) return places[a] < places[b] end)
end
local oldest_fresh = version - limits.max_staleness
for _, group in ipairs(groups) do
  local key = group_key(group)
  redis.call('ZADD', trained, version, group .. ':' .. redis.call('HINCRBY', key, 'uses', 1))
  redis.call('HINCRBY', key, 'unsaved', 1)
  redis.call('HDEL', key, 'shard', 'correction')
  local uses, oldest = unpack(redis.call('HMGET', key, 'uses', 'oldest'))
  if tonumber(uses) < limits.max_uses and tonumber(oldest) >= oldest_fresh then
    leave(group)
    redis.call('HSET', key, 'place', place_of(group, redis.call('HINCRBY', control, 'tickets', 1)))
    add_ready(group)
  else
    settle(group)
  end
end
count('uses', #groups)
raise_version(version, true)
-- What no lease could take any more is of no use to a rollback either.
for _, group in ipairs(redis.call('ZRANGEBYSCORE', kept, '-inf', '(' .. oldest_fresh, 'LIMIT', 0, SWEEP + #groups)) do
  drop_payloads(group)
end
enter()
return {'ok'}
