-- open: create the run's control state, or take it up again, and set its limits.
-- Invariant: version, epoch, tickets and cursor outlive every process of the run and are never reset.
-- ARGV: format number, payload instances, then name and value of each limit ('' = no bound)
local format, instances = redis.call('HGET', control, 'format'), redis.call('HGET', control, 'payload_instances')
if format and format ~= ARGV[1] then
  return {'format', format}
end
if instances and instances ~= ARGV[2] then
  return {'instances', instances}
end
for _, field in ipairs({'version', 'epoch', 'acks', 'tickets', 'cursor', 'bytes'}) do
  redis.call('HSETNX', control, field, 0)
end
redis.call('HSETNX', control, 'announced', -1)
redis.call('HSET', control, 'format', ARGV[1], 'payload_instances', ARGV[2], unpack(ARGV, 3))
wake('slots', 64)
return {'ok'}
