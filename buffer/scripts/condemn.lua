-- condemn: take a group out of a lease because its payload is damaged (quarantined) or missing (lost).
-- Invariant: a bad payload costs one group and one attempt of its task, never the batch. Damaged payloads, which the
-- caller has renamed, are kept for inspection, a bounded number of them. Idempotent: a group not in the lease is left
-- alone. It is no entry, but until the process that acks has
-- asked for the lease again, which is one, nobody gets it and it cannot be acked.
-- ARGV: epoch, known, ''; version of the lease, group, outcome, names of damaged payloads...
local refused = refuse()
if refused then
  return refused
end
local version, group, outcome = tonumber(ARGV[4]), ARGV[5], ARGV[6]
if tonumber(redis.call('ZSCORE', leased, group)) ~= version then
  return {'gone'}
end
local record = cjson.decode(redis.call('HGET', leases, version))
if limits.tokens_per_batch then
  local shard = redis.call('HGET', group_key(group), 'shard') + 1
  record.counts[shard] = record.counts[shard] - 1
end
record.condemned = true
redis.call('HSET', leases, version, cjson.encode(record))
discard(group, outcome)
local quarantine = prefix .. 'quarantine'
for position = 7, #ARGV do
  redis.call('LPUSH', quarantine, ARGV[position])
end
while redis.call('LLEN', quarantine) > 64 do
  delete_payloads({redis.call('RPOP', quarantine)})
end
return {'ok'}
