-- advance: raise the policy version without a batch, for a republication after a restart.
-- Invariant: the version never goes back. Idempotent and fenced.
-- ARGV: epoch, known, entry; version
local refused = refuse()
if refused then
  return refused
end
raise_version(tonumber(ARGV[4]), true)
enter()
return {'ok'}
