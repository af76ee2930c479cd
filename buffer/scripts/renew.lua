-- renew: extend the deadline of a slot.
-- Invariant: a slot whose group can no longer be fresh is not kept alive; it is discarded as stale on the spot.
-- ARGV: group, oldest version that its running episodes have sampled with ('' = none has sampled yet)
if not is_open() then
  return {'not_open'}
end
local group = ARGV[1]
if not redis.call('ZSCORE', reserved, group) then
  return {'gone'}
end
local committed, born = unpack(redis.call('HMGET', group_key(group), 'oldest', 'born'))
local oldest = tonumber(ARGV[2]) or tonumber(committed)
if oldest and committed then
  oldest = math.min(oldest, committed)
end
local why = why_stale(oldest, born, number('version'))
if why then
  discard_stale(group, why)
  return {'stale'}
end
redis.call('ZADD', reserved, 'XX', now() + limits.slot_ms, group)
return {'ok'}
