-- advance: raise the policy version without a batch, for a republication after a restart.
-- Invariant: the version never goes back. Idempotent and fenced.
-- ARGV: epoch, version
if not is_open() then
  return {'not_open'}
end
local epoch = number('epoch')
if tonumber(ARGV[1]) ~= epoch then
  return {'fenced', epoch}
end
if tonumber(ARGV[2]) > number('version') then
  redis.call('HSET', control, 'version', ARGV[2])
end
return {'ok'}
