-- ack: the learner has trained on a batch and published the weights that came of it.
-- Invariant: consuming the groups, freeing their slots and raising the version are one step, so a slot admitted
-- after it is sampled with the new weights. Exactly once: all groups of the lease or none; a repeated ack finds
-- the version already there and changes nothing. Only the current epoch may ack.
-- ARGV: epoch, version of the lease, new version, groups of the lease...
local refused = refuse(ARGV[1])
if refused then
  return refused
end
local lease, version = tonumber(ARGV[2]), tonumber(ARGV[3])
for position = 4, #ARGV do
  if tonumber(redis.call('ZSCORE', leased, ARGV[position])) ~= lease then
    local acked = redis.call('GET', prefix .. 'past:' .. ARGV[position]) == 'acked'
    return {(acked and number('version') >= version) and 'ok' or 'over'}
  end
end
for position = 4, #ARGV do
  redis.call('HDEL', prefix .. 'attempts', retire(ARGV[position], 'acked'))
end
if version > number('version') then
  redis.call('HSET', control, 'version', version)
end
return {'ok'}
