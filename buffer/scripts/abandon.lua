-- abandon: give a slot back unfinished.
-- Invariant: the slot is free at once, the loss is counted by reason, and the task is issued again a bounded
-- number of times; if enough members are in, they make a group. Idempotent: a group that is complete or gone is left
-- alone.
-- ARGV: group, reason
if not is_open() then
  return {'not_open'}
end
local group = ARGV[1]
if not redis.call('ZSCORE', reserved, group) then
  return {'gone'}
end
if close_slot(group, 'abandoned') then
  count('abandoned:' .. ARGV[2])
end
return {'ok'}
