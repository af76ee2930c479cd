-- drain: empty the buffer of open slots and ready groups.
-- Invariant: each is counted as abandoned, and its task is issued again without being charged. What the learner holds
-- and what a rollback may need stays. One chunk per call; the answer is how many.
-- ARGV: most groups
if not is_open() then
  return {'not_open'}
end
local most = math.min(SWEEP, tonumber(ARGV[1]))
local groups = redis.call('ZRANGE', ready, 0, most - 1)
if #groups == 0 then
  groups = redis.call('ZRANGE', running, 0, most - 1)
end
for _, group in ipairs(groups) do
  if discard(group, 'abandoned', true) then
    count('abandoned:drained')
  end
end
return {'ok', #groups}
