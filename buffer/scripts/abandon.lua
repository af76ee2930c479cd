-- abandon: give a slot back unfinished.
-- Invariant: the slot is free at once, the loss is counted by reason, and the task is issued again a bounded
-- number of times. Idempotent: a group that is complete or gone is left alone.
-- ARGV: group, reason
if not is_open() then
  return {'not_open'}
end
local group = ARGV[1]
if not redis.call('ZSCORE', reserved, group) then
  return {'gone'}
end
reissue(retire(group, 'abandoned'))
count('abandoned:' .. ARGV[2])
return {'ok'}
