-- release: the learner gives a lease back untrained.
-- Invariant: its groups are ready again in their old places and are counted nowhere. Idempotent and fenced.
-- ARGV: epoch, version of the lease
if not is_open() then
  return {'not_open'}
end
local epoch = number('epoch')
if tonumber(ARGV[1]) ~= epoch then
  return {'fenced', epoch}
end
redeliver(redis.call('ZRANGEBYSCORE', leased, ARGV[2], ARGV[2]))
return {'ok'}
