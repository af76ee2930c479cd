-- reclaim: end open slots now, for a caller who knows that the workers who held them are gone.
-- Invariant: as for a slot that expires by itself. One chunk per call; the answer is how many.
if not is_open() then
  return {'not_open'}
end
local open = redis.call('ZRANGE', reserved, 0, SWEEP - 1)
for _, group in ipairs(open) do
  close_slot(group, 'expired')
end
return {#open == SWEEP and 'more' or 'ok', #open}
