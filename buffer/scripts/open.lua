-- open: create the run's control state, or take it up again, and set its limits.
-- Invariant: version, epoch, tickets and cursor outlive every process of the run and are never reset.
-- ARGV: format number, max_staleness, max_age_ms ('' = no bound), groups_per_batch, group_size, max_bytes, slot_ms,
--   max_attempts
local format = redis.call('HGET', control, 'format')
if format and format ~= ARGV[1] then
  return {'format', format}
end
for _, field in ipairs({'version', 'epoch', 'tickets', 'cursor', 'bytes'}) do
  redis.call('HSETNX', control, field, 0)
end
redis.call('HSETNX', control, 'announced', -1)
redis.call('HSET', control, 'format', ARGV[1], 'max_staleness', ARGV[2], 'max_age_ms', ARGV[3],
  'groups_per_batch', ARGV[4], 'group_size', ARGV[5], 'max_bytes', ARGV[6], 'slot_ms', ARGV[7], 'max_attempts', ARGV[8])
wake('slots', 64)
return {'ok'}
