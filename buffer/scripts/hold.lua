-- hold: take up a lease that the server forgot, because it was killed before it had written it down.
-- Invariant: what the learner holds is leased to nobody else. The groups are the lease's, wherever they are now, and have
-- the members that were leased, wherever their payloads are: one that was forgotten is lost if it is ever needed again.
-- Groups that are forgotten altogether are trained all the same and, like everything that is forgotten, counted nowhere.
-- Idempotent and fenced.
-- ARGV: epoch, known, entry; version of the lease, its id, its number of shards; then for each of its groups: group,
-- shard, number of members, and index and 'bytes:nonce' of each
local refused = refuse()
if refused then
  return refused
end
if redis.call('LPOS', prefix .. 'closed', ARGV[5]) then
  return {'ok', entry()} -- it was acked meanwhile
end

-- Give a group the members that it had when it was leased.
local function restore(group, first, last)
  local key = group_key(group)
  for at = first, last, 2 do
    local bytes = tonumber(string.match(ARGV[at + 1], '^%d+'))
    if redis.call('HSETNX', key, 'm' .. ARGV[at], ARGV[at + 1]) == 1 then
      redis.call('HINCRBY', key, 'done', 1)
      redis.call('HINCRBY', key, 'bytes', bytes)
      redis.call('HINCRBY', control, 'bytes', bytes)
    end
  end
  redis.call('HSETNX', key, 'oldest', ARGV[4])
  redis.call('HSETNX', key, 'place', redis.call('HGET', key, 'ticket'))
end

local version, groups = ARGV[4], {}
local record = {id = ARGV[5], counts = {}}
for k = 1, tonumber(ARGV[6]) do
  record.counts[k] = 0
end
local at = 7
while at <= #ARGV do
  local group, shard, last = ARGV[at], tonumber(ARGV[at + 1]), at + 2 + 2 * ARGV[at + 2]
  local key = group_key(group)
  if redis.call('EXISTS', key) == 1 and redis.call('HEXISTS', key, 'settled') == 0 then
    leave(group)
    restore(group, at + 3, last)
    redis.call('ZADD', leased, version, group)
    redis.call('HSET', key, 'shard', shard)
    record.counts[shard + 1] = record.counts[shard + 1] + 1
    groups[group] = true
  end
  at = last + 1
end
for _, group in ipairs(redis.call('ZRANGEBYSCORE', leased, version, version)) do
  if not groups[group] then
    redeliver({group}) -- it was condemned, and is going to be again
  end
end
redis.call('HSET', leases, version, cjson.encode(record))
return {'ok', entry()}
