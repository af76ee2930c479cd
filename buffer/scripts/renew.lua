-- renew: extend the deadline of a slot.
-- Invariant: a slot whose group can no longer be fresh is not kept alive; it is retired as stale on the spot.
-- ARGV: group, oldest version that its running episodes have sampled with ('' = not known: that of the slot)
if not is_open() then
  return {'not_open'}
end
local group = ARGV[1]
if not redis.call('ZSCORE', reserved, group) then
  return {'gone'}
end
local oldest = tonumber(ARGV[2]) or tonumber(redis.call('HGET', group_key(group), 'version'))
if retire_if_stale(group, oldest, number('version')) then
  return {'stale'}
end
redis.call('ZADD', reserved, 'XX', now() + number('slot_ms'), group)
return {'ok'}
