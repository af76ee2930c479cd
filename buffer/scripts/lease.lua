-- lease: hand the oldest complete groups to the learner as one batch.
-- Invariant: no trajectory older than max_staleness versions or max_age_ms milliseconds is ever leased. The check and
-- the lease are this one script, and it judges by the version that the batch is going to be trained with, which the
-- learner passes. A lease has exactly groups_per_batch groups or does not happen; the same (epoch, version) is the
-- same batch, topped up if some of its groups were condemned since, and not judged again.
-- ARGV: epoch, version
local refused = refuse(ARGV[1])
if refused then
  return refused
end
local version = tonumber(ARGV[2])
if version < number('version') then
  return {'old', number('version')}
end
sweep()

local held = redis.call('ZRANGEBYSCORE', leased, version, version)
local need = number('groups_per_batch') - #held
if need > 0 then
  local most = need + SWEEP
  local candidates = redis.call('ZRANGE', ready, 0, most - 1)
  local fresh = {}
  for _, group in ipairs(candidates) do
    if not retire_if_stale(group, redis.call('HGET', group_key(group), 'oldest'), version) then
      fresh[#fresh + 1] = group
      if #fresh == need then
        break
      end
    end
  end
  if #fresh < need then
    -- Everything looked at was dealt with; if there may be more, the caller comes back at once.
    return {#candidates == most and 'again' or 'wait'}
  end
  for _, group in ipairs(fresh) do
    redis.call('ZREM', ready, group)
    redis.call('ZADD', leased, version, group)
    held[#held + 1] = group
  end
end

local tickets = {}
for _, group in ipairs(held) do
  tickets[group] = tonumber(redis.call('HGET', group_key(group), 'ticket'))
end
table.sort(held, function(a, b) return tickets[a] < tickets[b] end)
local batch = {'ok'}
for position, group in ipairs(held) do
  local members = {}
  for index = 0, redis.call('HGET', group_key(group), 'size') - 1 do
    members[index + 1] = 'm' .. index
  end
  local bytes = redis.call('HMGET', group_key(group), unpack(members))
  table.insert(bytes, 1, group)
  batch[position + 1] = bytes
end
return batch
