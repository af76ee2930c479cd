-- lease: hand ready groups to the learner as one batch, cut into disjoint shards.
-- Invariant: no trajectory older than max_staleness versions or max_age_ms milliseconds is ever leased. The check and
-- the lease are this one script, and it judges by the version that the batch is going to be trained with, which the
-- learner passes. A lease has exactly groups_per_batch groups, or as many as tokens_per_batch allows, or does not
-- happen; the same (epoch, version) is the same batch, and not judged again. A group that was condemned since is made up
-- for in the shard that it was in; under tokens_per_batch the batch is smaller by it. Only the process of a gang that
-- will ack it makes a lease, and makes up for what was condemned; for the others, whose entry is '', it is there or not.
-- ARGV: epoch, known, entry; version, number of shards
local refused = refuse()
if refused then
  return refused
end
local leads, version, shards = ARGV[3] ~= '', tonumber(ARGV[4]), tonumber(ARGV[5])
if version < number('version') then
  return {'old', number('version')}
end
sweep()

-- Discard ready groups that are too stale for `version`; return whether there may be more of them.
local function evict()
  local oldest_fresh = version - limits.max_staleness
  local old = redis.call('ZRANGEBYSCORE', ready_versions, '-inf', '(' .. oldest_fresh, 'LIMIT', 0, SWEEP)
  local max_age_ms = limits.max_age_ms
  if #old == 0 and max_age_ms then
    old = redis.call('ZRANGEBYSCORE', ready_births, '-inf', '(' .. now() - max_age_ms, 'LIMIT', 0, SWEEP)
  end
  for _, group in ipairs(old) do
    local oldest, born = unpack(redis.call('HMGET', group_key(group), 'oldest', 'born'))
    discard_stale(group, why_stale(tonumber(oldest), born, version))
  end
  return #old > 0
end

-- The groups to lease, `need` of them or up to the budget of tokens; nil if there are not enough.
local function pick(need)
  local budget, last = limits.tokens_per_batch or math.huge, '+inf'
  local look_ahead, first = limits.look_ahead, redis.call('ZRANGE', running, 0, 0, 'WITHSCORES')
  if look_ahead and first[1] then
    last = first[2] + look_ahead -- the oldest group that still runs is not overtaken by more than this
  end
  local rows = redis.call('ZRANGEBYSCORE', ready, '-inf', last, 'WITHSCORES', 'LIMIT', 0, need + 1)
  local picked, total, full = {}, 0, false
  for at = 1, #rows, 2 do
    total = total + redis.call('HGET', group_key(rows[at]), 'tokens')
    full = #picked == need or (#picked > 0 and total > budget)
    if full then
      break
    end
    picked[#picked + 1] = rows[at]
  end
  if not full and #picked < need then
    return nil
  end
  if redis.call('HGET', control, 'order') ~= 'fifo' then
    local horizon = number('horizon') or 0
    local next_place = tonumber(rows[2 * #picked + 2])
    if redis.call('HGET', control, 'order') == 'priority' then
      -- Each stood with probability 1 - exp(-weight * (next_place - horizon)) among those before the next one.
      local stored = redis.call('ZCARD', ready)
      for _, group in ipairs(picked) do
        local weight = tonumber(redis.call('HGET', group_key(group), 'weight')) or 1
        local chance = next_place and next_place > horizon and 1 - math.exp(-weight * (next_place - horizon)) or 1
        redis.call('HSET', group_key(group), 'correction', #picked / (stored * chance))
      end
    end
    redis.call('HSET', control, 'horizon', math.max(horizon, tonumber(rows[2 * #picked])))
  end
  return picked
end

-- Give each of `groups` to the shard that lacks one, or, for a new lease, to the shard with the fewest bytes so far.
local function shard(groups, held, record)
  local bytes, load, lacking = {}, {}, {}
  for _, group in ipairs(groups) do
    bytes[group] = tonumber(redis.call('HGET', group_key(group), 'bytes'))
  end
  table.sort(groups, function(a, b) return bytes[a] > bytes[b] or (bytes[a] == bytes[b] and a < b) end)
  for k = 1, shards do
    load[k], lacking[k] = 0, record.counts[k] or 0
  end
  for _, group in ipairs(held) do
    local k = redis.call('HGET', group_key(group), 'shard') + 1
    lacking[k] = lacking[k] - 1
  end
  for _, group in ipairs(groups) do
    local best = 1
    for k = 2, shards do
      if record.id and lacking[k] > lacking[best] or not record.id and load[k] < load[best] then
        best = k
      end
    end
    load[best], lacking[best] = load[best] + bytes[group], lacking[best] - 1
    if not record.id then
      record.counts[best] = (record.counts[best] or 0) + 1
    end
    redis.call('HSET', group_key(group), 'shard', best - 1)
    redis.call('ZADD', leased, version, group)
    take_ready(group)
  end
end

local function wait()
  local first = redis.call('ZRANGE', running, 0, 0)
  return {'wait', first[1] and redis.call('HGET', group_key(first[1]), 'worker') or ''}
end

local stored = redis.call('HGET', leases, version)
local record, size = stored and cjson.decode(stored) or {counts = {}}, 0
if record.id and #record.counts ~= shards then
  return {'shards', #record.counts}
end
for _, groups in ipairs(record.counts) do
  size = size + groups
end
if size == 0 and leads then
  record = {counts = {}} -- of a batch that was cut by tokens, every group was condemned
end
if not leads and (not record.id or record.condemned) then
  return wait()
end
local held, need = redis.call('ZRANGEBYSCORE', leased, version, version), limits.groups_per_batch
if record.id then
  need = size - #held
end
if need > 0 then
  if evict() then
    return {'again'}
  end
  local picked = pick(need)
  if not picked then
    return wait()
  end
  for k = 1, record.id and 0 or shards do
    record.counts[k] = 0
  end
  shard(picked, held, record)
  for _, group in ipairs(picked) do
    held[#held + 1] = group
  end
end
if need > 0 or record.condemned then
  record.id, record.entry, record.condemned = record.id or ARGV[3], ARGV[3], nil
  redis.call('HSET', leases, version, cjson.encode(record))
  enter()
  for _ = 2, shards do
    wake('lease', shards) -- the other processes of the gang wait for it
  end
end

local places = {}
for _, group in ipairs(held) do
  places[group] = tonumber(redis.call('HGET', group_key(group), 'place'))
end
table.sort(held, function(a, b) return places[a] < places[b] end)
local batch = {'ok', record.entry, record.id}
for position, group in ipairs(held) do
  local of_shard, correction, oldest, tokens, weight =
    unpack(redis.call('HMGET', group_key(group), 'shard', 'correction', 'oldest', 'tokens', 'weight'))
  batch[position + 3] = {group, of_shard, correction or '1', oldest, tokens, weight or '', unpack(members_of(group))}
end
return batch
