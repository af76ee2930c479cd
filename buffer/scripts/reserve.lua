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
local slot_ms = limits.slot_ms

if redis.call('EXISTS', key) == 0 then
  local open = redis.call('ZCARD', reserved)
  local outstanding = open + redis.call('ZCARD', ready) + redis.call('ZCARD', leased)
  if outstanding >= (limits.max_staleness + 1) * limits.groups_per_batch then
    return {'busy'}
  end
  -- An upper estimate, since members already committed to an open slot count twice. The first group is always
  -- admitted: without one there would be neither progress nor an estimate. Payloads kept for a rollback give way.
  local room = limits.max_bytes - (open + 1) * (number('group_bytes') or 0)
  for _ = 1, SWEEP do
    local oldest = number('bytes') > room and redis.call('ZRANGE', kept, 0, 0)[1]
    if not oldest then
      break
    end
    drop_payloads(oldest)
  end
  if outstanding > 0 and number('bytes') > room then
    return {'busy'}
  end
  local task = redis.call('LPOP', prefix .. 'retry') or redis.call('HINCRBY', control, 'cursor', 1) - 1
  local ticket, born = redis.call('HINCRBY', control, 'tickets', 1), now()
  redis.call('HSET', key, 'task', task, 'ticket', ticket, 'born', born, 'size', limits.group_size, 'worker', worker,
    'version', number('version'), 'done', 0, 'dropped', 0, 'bytes', 0, 'tokens', 0, 'uses', 0, 'unsaved', 0)
  redis.call('ZADD', reserved, born + slot_ms, group)
  redis.call('ZADD', running, ticket, group)
  count('reserved')
end
local task, size, version = unpack(redis.call('HMGET', key, 'task', 'size', 'version'))
return {'ok', tonumber(task), tonumber(size), tonumber(version), slot_ms}
