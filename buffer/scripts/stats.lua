-- stats: everything that is countable, from one moment, so that it adds up.
if not is_open() then
  return {'not_open'}
end
sweep()
local first = redis.call('ZRANGE', reserved, 0, 0, 'WITHSCORES')
local worker, left_ms = '', 0
if first[1] then
  worker = redis.call('HGET', group_key(first[1]), 'worker')
  left_ms = first[2] - now()
end
local born = redis.call('ZRANGE', ready_births, 0, 0, 'WITHSCORES')[2]
local version = redis.call('ZRANGE', ready_versions, 0, 0, 'WITHSCORES')[2]
return {'ok', redis.call('HGETALL', control), redis.call('HGETALL', prefix .. 'counters'),
  redis.call('ZCARD', reserved), redis.call('ZCARD', ready), redis.call('ZCARD', leased), redis.call('ZCARD', trained),
  redis.call('ZCARD', kept), worker, left_ms, born and now() - born or 0, version or ''}
