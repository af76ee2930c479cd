-- checkpointed: a checkpoint is durable that holds the weights of this version.
-- Invariant: a group is forgotten only when every use of it is in a durable checkpoint. Idempotent and fenced; one
-- chunk per call, the answer is how many uses it had. It is no entry: the next one says it all again.
-- ARGV: epoch, known, ''; version
local refused = refuse()
if refused then
  return refused
end
local saved = redis.call('ZRANGEBYSCORE', trained, '-inf', ARGV[4], 'LIMIT', 0, SWEEP)
for _, use in ipairs(saved) do
  local group = string.match(use, '^(.*):%d+$')
  redis.call('ZREM', trained, use)
  local unsaved = redis.call('HINCRBY', group_key(group), 'unsaved', -1)
  if unsaved == 0 and redis.call('HEXISTS', group_key(group), 'settled') == 1 then
    forget(group, 'acked')
  end
end
return {#saved == SWEEP and 'more' or 'ok', #saved}
