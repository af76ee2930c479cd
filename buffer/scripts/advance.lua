-- advance: raise the policy version without a batch, for a republication after a restart.
-- Invariant: the version never goes back. Idempotent and fenced.
-- ARGV: epoch, version
local refused = refuse(ARGV[1])
if refused then
  return refused
end
if tonumber(ARGV[2]) > number('version') then
  redis.call('HSET', control, 'version', ARGV[2])
end
return {'ok'}
