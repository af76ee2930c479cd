-- fail: an episode ended through no fault of the policy.
-- Invariant: a member is tried max_member_attempts times, then the group does without it, or, if it would be smaller
-- than min_group_size, its slot is abandoned. So a failing member never holds up a group for ever.
-- Idempotent: the caller numbers the failures of a member.
-- ARGV: group, index, number of this failure (from 1), reason
if not is_open() then
  return {'not_open'}
end
local group, index, failures, reason = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local key = group_key(group)
if not redis.call('ZSCORE', reserved, group) then
  return {redis.call('HEXISTS', key, 'd' .. index) == 1 and 'dropped' or 'gone'}
end
local size = tonumber(redis.call('HGET', key, 'size'))
if tonumber(index) >= size then
  return {'index'}
end
if failures > (tonumber(redis.call('HGET', key, 'f' .. index)) or 0) then
  redis.call('HSET', key, 'f' .. index, failures)
  count('failed:' .. reason)
end
if failures < limits.max_member_attempts then
  return {'retry'}
end
if redis.call('HEXISTS', key, 'm' .. index) == 0 and redis.call('HSETNX', key, 'd' .. index, 1) == 1 then
  local dropped = redis.call('HINCRBY', key, 'dropped', 1)
  if size - dropped < limits.min_group_size then
    discard(group, 'abandoned')
    count('abandoned:' .. reason)
    return {'gone'}
  end
  if tonumber(redis.call('HGET', key, 'done')) == size - dropped then
    complete(group)
  end
end
return {'dropped'}
