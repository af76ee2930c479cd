-- hold: take up a lease that the server forgot, because it was killed before it had written it down.
-- Invariant: what the learner holds is leased to nobody else. The groups are the lease's, wherever they are now, and have
-- the members that were leased, wherever their payloads are: one that was forgotten is lost if it is ever needed again.
-- Groups that are forgotten altogether are trained all the same and, like everything that is forgotten, counted nowhere.
-- Idempotent and fenced.
-- ARGV: epoch, known, entry; version of the lease, its id, its number of shards; then for each of its groups: group,
-- shard, correction, oldest version among its sampled tokens, tokens, weight ('' = 1), number of members, and index and
-- 'bytes:nonce' of each
local refused = refuse()
if refused then
  return refused
end
if is_done() then
  return {'ok'}
elseif redis.call('ZSCORE', journal, 'ack:' .. ARGV[5]) then
  enter()
  return {'ok'}
end

-- Give a group what it had when it was leased; `at` is the position of its name.
local function restore(group, at)
  local key, oldest = group_key(group), tonumber(ARGV[at + 3])
  for member = at + 7, at + 6 + 2 * ARGV[at + 6], 2 do
    local bytes = string.match(ARGV[member + 1], '^%d+')
    if redis.call('HSETNX', key, 'm' .. ARGV[member], ARGV[member + 1]) == 1 then
      redis.call('HINCRBY', key, 'done', 1)
      redis.call('HINCRBY', key, 'bytes', bytes)
      redis.call('HINCRBY', control, 'bytes', bytes)
    end
  end
  oldest = math.min(oldest, tonumber(redis.call('HGET', key, 'oldest') or oldest))
  redis.call('HSET', key, 'oldest', oldest, 'tokens', ARGV[at + 4])
  if ARGV[at + 5] ~= '' then
    redis.call('HSET', key, 'weight', ARGV[at + 5])
  end
  redis.call('HSETNX', key, 'place', redis.call('HGET', key, 'ticket'))
end

local version, groups, at = ARGV[4], {}, 7
local record = {id = ARGV[5], entry = ARGV[3], counts = {}}
for k = 1, tonumber(ARGV[6]) do
  record.counts[k] = 0
end
while at <= #ARGV do
  local group, shard = ARGV[at], tonumber(ARGV[at + 1])
  local key = group_key(group)
  if redis.call('EXISTS', key) == 1 and redis.call('HEXISTS', key, 'settled') == 0 then
    leave(group)
    restore(group, at)
    redis.call('ZADD', leased, version, group)
    redis.call('HSET', key, 'shard', shard, 'correction', ARGV[at + 2])
    record.counts[shard + 1] = record.counts[shard + 1] + 1
    groups[group] = true
  end
  at = at + 7 + 2 * ARGV[at + 6]
end
for _, group in ipairs(redis.call('ZRANGEBYSCORE', leased, version, version)) do
  if not groups[group] then
    redeliver({group}) -- it was condemned, and is going to be again
  end
end
redis.call('HSET', leases, version, cjson.encode(record))
enter()
return {'ok'}
