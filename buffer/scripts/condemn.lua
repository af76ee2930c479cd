-- condemn: take a group out of a lease because its payload is damaged (quarantined) or missing (lost).
-- Invariant: a bad payload costs one group and one attempt of its task, never the batch. Damaged payloads, which the
-- caller has renamed, are kept for inspection, a bounded number of them. Idempotent: a group not in the lease is left
-- alone.
-- ARGV: epoch, version of the lease, group, outcome, names of damaged payloads...
local refused = refuse(ARGV[1])
if refused then
  return refused
end
local version, group, outcome = tonumber(ARGV[2]), ARGV[3], ARGV[4]
if tonumber(redis.call('ZSCORE', leased, group)) ~= version then
  return {'gone'}
end
if limits.tokens_per_batch then
  local record = cjson.decode(redis.call('HGET', leases, version))
  local shard = redis.call('HGET', group_key(group), 'shard') + 1
  record.counts[shard] = record.counts[shard] - 1
  redis.call('HSET', leases, version, cjson.encode(record))
end
discard(group, outcome)
if redis.call('ZCOUNT', leased, version, version) == 0 then
  redis.call('HDEL', leases, version)
end
local quarantine = prefix .. 'quarantine'
for position = 5, #ARGV do
  redis.call('LPUSH', quarantine, ARGV[position])
end
while redis.call('LLEN', quarantine) > 64 do
  delete_payloads({redis.call('RPOP', quarantine)})
end
return {'ok'}
