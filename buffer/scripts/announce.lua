-- announce: the learner is about to hand out weights under this version.
-- Invariant: a version names one set of weights. What was announced is never announced again by a later epoch, even if
-- the learner died before it could raise the version. Idempotent and fenced.
-- ARGV: epoch, known, entry; version
local refused = refuse()
if refused then
  return refused
end
raise_version(tonumber(ARGV[4]), false)
enter()
return {'ok'}
