-- rollback: training goes on from the checkpoint with the weights of this version (-1: from the beginning).
-- Invariant: nothing that the weights have not learned from counts as trained. Every later use is undone: its group is
-- ready again in its old place (see put_back); if its payloads are gone, because no lease could take them any more, its task is issued
-- again. The policy version does not go back. Idempotent and fenced; one chunk per call, the answer is how many uses it
-- had. Nothing may be leased.
-- ARGV: epoch, known, entry; version
local refused = refuse()
if refused then
  return refused
end
if is_done() then
  return {'ok', 0}
end
if redis.call('ZCARD', leased) > 0 then
  return {'leased', redis.call('ZCARD', leased)}
end
local later = redis.call('ZRANGEBYSCORE', trained, '(' .. ARGV[4], '+inf', 'LIMIT', 0, SWEEP)
for _, use in ipairs(later) do
  local group = string.match(use, '^(.*):%d+$')
  local key = group_key(group)
  redis.call('ZREM', trained, use)
  local uses = redis.call('HINCRBY', key, 'uses', -1)
  redis.call('HINCRBY', key, 'unsaved', -1)
  count('rolled_back')
  if redis.call('HDEL', key, 'settled') == 1 then
    count('acked', -1)
    if redis.call('ZREM', kept, group) == 1 then -- its payloads are here
      put_back(group)
    elseif uses > 0 then
      settle(group)
    else
      discard(group, 'stale', true)
    end
  end
end
if #later == SWEEP then
  return {'more', #later}
end
enter()
return {'ok', #later}
