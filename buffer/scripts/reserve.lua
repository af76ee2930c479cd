-- reserve: admit one group.
-- Invariant: reserved + ready + leased <= (max_staleness + 1) * groups_per_batch, counted on what is really
-- there, so that nothing drifts: what is admitted can still be fresh when its turn comes. The bytes that are
-- stored, plus the bytes that all open slots are expected to bring, stay within max_bytes.
-- Idempotent by group: the caller names the group, and the same name gets the same slot.
-- ARGV: group, worker
if not is_open() then
  return {'not_open'}
end
sweep()
local group, worker = ARGV[1], ARGV[2]
local key = group_key(group)
local slot_ms = number('slot_ms')

if redis.call('EXISTS', key) == 0 then
  local open = redis.call('ZCARD', reserved)
  local outstanding = open + redis.call('ZCARD', ready) + redis.call('ZCARD', leased)
  if outstanding >= (number('max_staleness') + 1) * number('groups_per_batch') then
    return {'busy'}
  end
  -- An upper estimate, since members already committed to an open slot count twice. The first group is always
  -- admitted: without one there would be neither progress nor an estimate.
  local expected = number('bytes') + (open + 1) * (number('group_bytes') or 0)
  if outstanding > 0 and expected > number('max_bytes') then
    return {'busy'}
  end
  local task = redis.call('LPOP', prefix .. 'retry') or redis.call('HINCRBY', control, 'cursor', 1) - 1
  local born = now()
  redis.call('HSET', key, 'task', task, 'ticket', redis.call('HINCRBY', control, 'tickets', 1), 'born', born,
    'size', number('group_size'), 'worker', worker, 'version', number('version'), 'done', 0, 'bytes', 0)
  redis.call('ZADD', reserved, born + slot_ms, group)
  count('reserved')
end
local task, size, version = unpack(redis.call('HMGET', key, 'task', 'size', 'version'))
return {'ok', tonumber(task), tonumber(size), tonumber(version), slot_ms}
