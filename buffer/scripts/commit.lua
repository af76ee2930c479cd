-- commit: admit a staged payload as one member of its group.
-- Invariant: a member is admitted at most once per (group, index), and only into an open slot; whatever the
-- answer, the staged payload is gone afterwards. Payload bytes never enter Lua: the caller has SET them under
-- KEYS[2] with a time to live, in the same pipeline.
-- A slot past its deadline that nobody has swept yet is still open: the work is done, so it is taken.
-- ARGV: group, index, bytes of the payload, oldest version among its sampled tokens
if not is_open() then
  return {'not_open'}
end
local staged, group, index, bytes, oldest = KEYS[2], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local key = group_key(group)

local function refuse(answer)
  redis.call('UNLINK', staged)
  return {answer}
end

if redis.call('EXISTS', key) == 0 then
  local past = redis.call('GET', prefix .. 'past:' .. group)
  if past == 'acked' then
    return refuse('duplicate')
  end
  return refuse(past == 'stale' and 'stale' or 'expired')
end
local size = tonumber(redis.call('HGET', key, 'size'))
if index >= size then
  redis.call('UNLINK', staged)
  return {'index', size}
end
local member = 'm' .. index
if redis.call('HEXISTS', key, member) == 1 then
  return refuse('duplicate')
end
if retire_if_stale(group, oldest, number('version')) then
  return refuse('stale')
end
if redis.call('EXISTS', staged) == 0 then
  return {'unstaged'}
end

redis.call('RENAME', staged, payload_key(group, index))
redis.call('PERSIST', payload_key(group, index))
local before = tonumber(redis.call('HGET', key, 'oldest')) or oldest
redis.call('HSET', key, member, bytes, 'oldest', math.min(before, oldest))
redis.call('HINCRBY', control, 'bytes', bytes)
local group_bytes = redis.call('HINCRBY', key, 'bytes', bytes)
if redis.call('HINCRBY', key, 'done', 1) == size then
  redis.call('ZREM', reserved, group)
  redis.call('ZADD', ready, redis.call('HGET', key, 'ticket'), group)
  local mean = number('group_bytes') or group_bytes
  redis.call('HSET', control, 'group_bytes', math.ceil(mean + (group_bytes - mean) / 32))
  if redis.call('ZCARD', ready) >= number('groups_per_batch') then
    wake('ready', 1)
  end
end
return {'accepted'}
