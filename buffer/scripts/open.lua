-- open: create the run's control state, or take it up again, and set its limits.
-- Invariant: version, epoch, tickets and cursor outlive every process of the run and are never reset.
-- ARGV: format number, payload instances, then name and value of each limit ('' = no bound)
local order = redis.call('HGET', control, 'order')
local format, instances = redis.call('HGET', control, 'format'), redis.call('HGET', control, 'payload_instances')
if format and format ~= ARGV[1] then
  return {'format', format}
end
if instances and instances ~= ARGV[2] then
  return {'instances', instances}
end
for _, field in ipairs({'version', 'epoch', 'entries', 'tickets', 'cursor', 'bytes'}) do
  redis.call('HSETNX', control, field, 0)
end
redis.call('HSETNX', control, 'announced', -1)
redis.call('HSET', control, 'format', ARGV[1], 'payload_instances', ARGV[2], unpack(ARGV, 3))
if order and order ~= redis.call('HGET', control, 'order') then -- places of one order mean nothing in another
  for _, group in ipairs(redis.call('ZRANGE', ready, 0, -1)) do
    local place = place_of(group, redis.call('HGET', group_key(group), 'ticket'))
    redis.call('HSET', group_key(group), 'place', place)
    redis.call('ZADD', ready, place, group)
  end
end
wake('slots', 64)
return {'ok'}
