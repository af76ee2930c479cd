-- announce: the learner is about to hand out weights under this version.
-- Invariant: a version names one set of weights. What was announced is never announced again by a later epoch, even if
-- the learner died before it could raise the version. Idempotent and fenced.
-- ARGV: epoch, version
if not is_open() then
  return {'not_open'}
end
local epoch = number('epoch')
if tonumber(ARGV[1]) ~= epoch then
  return {'fenced', epoch}
end
if tonumber(ARGV[2]) > number('announced') then
  redis.call('HSET', control, 'announced', ARGV[2])
end
return {'ok'}
