-- The ledger: part of every script (the loader puts it in front).
-- Invariant: a group is in exactly one of reserved, ready and leased, and leaves through retire(), which
-- adds it to exactly one counter. So always
--   counter reserved = acked + stale + expired + abandoned + quarantined + lost + groups outstanding.
--
-- KEYS[1] is the run's control hash; all other keys share its hash tag and so its cluster slot:
--   control      hash   format, version, announced, epoch, tickets, cursor, bytes, group_bytes,
--                       clock, set_back and the limits
--   counters     hash   what became of groups
--   reserved     zset   group -> deadline in milliseconds of the run's clock, see now()
--   ready        zset   group -> ticket; the order in which slots were given is the order of leases
--   leased       zset   group -> version of the lease that holds it
--   group:<g>    hash   task, ticket, size, worker, version, born, done, bytes, oldest, m<i> = bytes of member i
--   payload:<g>:<i>     bytes of a committed member
--   past:<g>     string what became of a group, for a while, so that a late retry gets the right answer
--   retry        list   tasks to issue again before new ones;  attempts  hash  task -> slots it failed in
--   wake:ready, wake:slots   lists of at most a few tokens, on which the learner and the workers block

local control = KEYS[1]
local prefix = string.sub(control, 1, -8)
local reserved, ready, leased = prefix .. 'reserved', prefix .. 'ready', prefix .. 'leased'
local SWEEP = 64 -- groups per sweep: a script must not hold the server for long
local PAST_SECONDS = 300

-- A server before 7.0 that is full refuses a script whose first write may take memory. This one changes nothing and
-- takes none, so that every script runs; newer servers are told by a flag.
redis.call('PERSIST', control)

local function number(field)
  return tonumber(redis.call('HGET', control, field))
end

local function is_open()
  return redis.call('EXISTS', control) == 1
end

-- What a learner of the given epoch is told instead of an answer: the run is not open, or another learner has taken over.
local function refuse(epoch)
  if not is_open() then
    return {'not_open'}
  end
  if tonumber(epoch) ~= number('epoch') then
    return {'fenced', number('epoch')}
  end
end

local function count(name, n)
  redis.call('HINCRBY', prefix .. 'counters', name, n or 1)
end

-- The run's clock in milliseconds: the server's, plus whatever that was ever set back, so that it never goes back
-- nor stands still. A script sees one moment.
local moment
local function now()
  if not moment then
    local time = redis.call('TIME')
    local clock = time[1] * 1000 + math.floor(time[2] / 1000)
    local set_back = (number('set_back') or 0) + math.max(0, (number('clock') or 0) - clock)
    redis.call('HSET', control, 'clock', clock, 'set_back', set_back)
    moment = clock + set_back
  end
  return moment
end

local function group_key(group)
  return prefix .. 'group:' .. group
end

local function payload_key(group, index)
  return prefix .. 'payload:' .. group .. ':' .. index
end

local function wake(whom, most)
  redis.call('LPUSH', prefix .. 'wake:' .. whom, 1)
  redis.call('LTRIM', prefix .. 'wake:' .. whom, 0, most - 1)
end

-- Take a group out of the buffer, count it under `outcome`, and return its task.
local function retire(group, outcome)
  local key = group_key(group)
  local task, size, bytes = unpack(redis.call('HMGET', key, 'task', 'size', 'bytes'))
  redis.call('ZREM', reserved, group)
  redis.call('ZREM', ready, group)
  redis.call('ZREM', leased, group)
  local payloads = {}
  for index = 0, size - 1 do
    payloads[index + 1] = payload_key(group, index)
  end
  redis.call('UNLINK', key, unpack(payloads))
  redis.call('HINCRBY', control, 'bytes', 0 - bytes) -- not -bytes, which would send '-0' for 0
  redis.call('SET', prefix .. 'past:' .. group, outcome, 'EX', PAST_SECONDS)
  count(outcome)
  wake('slots', 64)
  return task
end

-- Issue a task again, unless it already had as many slots as it may have.
local function reissue(task)
  if redis.call('HINCRBY', prefix .. 'attempts', task, 1) < number('max_attempts') then
    redis.call('RPUSH', prefix .. 'retry', task)
  else
    redis.call('HDEL', prefix .. 'attempts', task)
    count('tasks_given_up')
  end
end

-- Retire a group that is too stale to be trained with `version`, in versions or in seconds; return whether it was.
-- `oldest` is the oldest version among its sampled tokens. None of them is older than its slot, whose age is the bound
-- of theirs. `stale:age` counts those of the `stale` that only their age made so.
local function retire_if_stale(group, oldest, version)
  local old_version = version - oldest > number('max_staleness')
  local age_ms = now() - redis.call('HGET', group_key(group), 'born')
  if not old_version and age_ms <= (number('max_age_ms') or math.huge) then
    return false
  end
  reissue(retire(group, 'stale'))
  if not old_version then
    count('stale:age')
  end
  return true
end

-- Retire slots whose deadline has passed; the rest of a long queue is left to the next call.
local function sweep()
  local late = redis.call('ZRANGEBYSCORE', reserved, '-inf', now(), 'LIMIT', 0, SWEEP)
  for _, group in ipairs(late) do
    reissue(retire(group, 'expired'))
  end
end

-- Put every group of `groups`, all of them leased, back where the next lease finds it, in its old place.
local function redeliver(groups)
  for _, group in ipairs(groups) do
    redis.call('ZREM', leased, group)
    redis.call('ZADD', ready, redis.call('HGET', group_key(group), 'ticket'), group)
    count('redelivered')
  end
end
