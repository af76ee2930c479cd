-- announce: the learner is about to hand out weights under this version.
-- Invariant: a version names one set of weights. What was announced is never announced again by a later epoch, even if
-- the learner died before it could raise the version. Idempotent and fenced.
-- ARGV: epoch, version
local refused = refuse(ARGV[1])
if refused then
  return refused
end
if tonumber(ARGV[2]) > number('announced') then
  redis.call('HSET', control, 'announced', ARGV[2])
end
return {'ok'}
