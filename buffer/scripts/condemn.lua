-- condemn: take a group out of a lease because its payload is damaged (quarantined) or missing (lost).
-- Invariant: a bad payload costs one group and one attempt of its task, never the batch. Damaged payloads are
-- kept for inspection, a bounded number for a bounded time. Idempotent: a group not in the lease is left alone.
-- ARGV: epoch, version of the lease, group, outcome, seconds to keep the payloads
local refused = refuse(ARGV[1])
if refused then
  return refused
end
local version, group, outcome = tonumber(ARGV[2]), ARGV[3], ARGV[4]
if tonumber(redis.call('ZSCORE', leased, group)) ~= version then
  return {'gone'}
end
if outcome == 'quarantined' then
  local kept = prefix .. 'quarantine'
  for index = 0, redis.call('HGET', group_key(group), 'size') - 1 do
    local payload = payload_key(group, index)
    if redis.call('EXISTS', payload) == 1 then
      local name = prefix .. 'quarantine:' .. group .. ':' .. index
      redis.call('RENAME', payload, name)
      redis.call('EXPIRE', name, ARGV[5])
      redis.call('LPUSH', kept, name)
    end
  end
  while redis.call('LLEN', kept) > 64 do
    redis.call('UNLINK', redis.call('RPOP', kept))
  end
end
reissue(retire(group, outcome))
return {'ok'}
