-- The ledger: part of every script (the loader puts it in front).
-- Invariant: a group is in exactly one of reserved, ready and leased, and leaves through settle() or discard(), which add
-- it to exactly one counter. So always
--   counter reserved = acked + stale + expired + abandoned + quarantined + lost + groups outstanding.
--
-- KEYS[1] is the run's control hash; all other keys share its hash tag and so its cluster slot:
--   control      hash   format, version, announced, epoch, holder, entries, tickets, cursor, bytes, group_bytes, horizon,
--                       payload_instances, clock, set_back and the limits
--   counters     hash   what became of groups
--   reserved     zset   group -> deadline in milliseconds of the run's clock, see now()
--   running      zset   the same groups -> ticket
--   ready        zset   group -> place; the lowest places are leased first
--   ready_versions, ready_births   zsets   the same groups -> oldest version, time of birth
--   leased       zset   group -> version of the lease that holds it
--   leases       hash   version of a lease -> JSON {id, entry, counts, condemned}; counts[k] = groups of its shard k - 1;
--                       condemned = groups were taken out since entry
--   journal      zset   names of the learner's last entries in this epoch -> their order
--   trained      zset   group:use -> version of the weights that came of that use, until a checkpoint holds them
--   kept         zset   trained groups whose payloads are still here -> oldest version
--   group:<g>    hash   task, ticket, place, size, worker, version, born, done, dropped, bytes, tokens, weight, oldest,
--                       uses, unsaved (uses that no checkpoint holds), settled, shard, correction,
--                       m<i> = bytes:nonce of member i, f<i> = failures of member i, d<i> = member i is given up
--   payload:<g>:<i>:<nonce>   bytes of a member, here or on the group's payload instance
--   garbage      list   payloads on payload instances that are to be deleted; scripts cannot reach them
--   past:<g>     string what became of a group, for a while, so that a late retry gets the right answer
--   quarantine   list   names of the damaged payloads that are kept: quarantine:<g>:<i>:<nonce>
--   retry        list   tasks to issue again before new ones;  attempts  hash  task -> slots it failed in
--   wake:ready, wake:lease, wake:slots   lists of at most a few tokens, on which the learner that leads a gang, the others
--                       of it, and the workers block

local control = KEYS[1]
local prefix = string.sub(control, 1, -8)
local reserved, running, leased = prefix .. 'reserved', prefix .. 'running', prefix .. 'leased'
local ready, ready_versions, ready_births = prefix .. 'ready', prefix .. 'ready_versions', prefix .. 'ready_births'
local leases, journal = prefix .. 'leases', prefix .. 'journal'
local trained, kept = prefix .. 'trained', prefix .. 'kept'
local SWEEP = 64 -- groups per sweep: a script must not hold the server for long
local PAST_SECONDS = 300
local JOURNAL = 1024 -- entries besides the beginning of the epoch: more than any client keeps

-- A server before 7.0 that is full refuses a script whose first write may take memory. This one changes nothing and
-- takes none, so that every script runs; newer servers are told by a flag.
redis.call('PERSIST', control)

local function number(field)
  return tonumber(redis.call('HGET', control, field))
end

-- What does not change within a script, read in one call: every call from Lua costs more than what it does.
local LIMITS = {'format', 'payload_instances', 'max_staleness', 'max_age_ms', 'groups_per_batch', 'tokens_per_batch',
  'group_size', 'min_group_size', 'max_bytes', 'slot_ms', 'max_attempts', 'max_member_attempts', 'look_ahead', 'max_uses'}
local limits = {}
for position, value in ipairs(redis.call('HMGET', control, unpack(LIMITS))) do
  limits[LIMITS[position]] = tonumber(value or '')
end

local function is_open()
  return limits.format ~= nil
end

-- What a learner changes is an entry of a journal that it keeps, see buffer/journal.py; here are the names of those that
-- were executed. So a server that was killed, and forgot entries that were answered, finds that out before it does anything
-- else. A call of a learner begins with three arguments: the epoch; names of the last entries that the caller knows to be
-- here; the name of the entry that the call is, '' if it is none. An entry is executed once, however often it is sent.

-- What a learner is told instead of an answer: the run is not open, another learner has taken over, or the server forgot.
local function refuse()
  if not is_open() then
    return {'not_open'}
  end
  local epoch, current = tonumber(ARGV[1]), number('epoch')
  if epoch < current then
    return {'fenced', current}
  end
  local is_forgotten = epoch > current
  for entry in string.gmatch(ARGV[2], '%S+') do
    is_forgotten = is_forgotten or not redis.call('ZSCORE', journal, entry)
  end
  if is_forgotten then
    return {'forgotten', current}
  end
end

local function is_done()
  return redis.call('ZSCORE', journal, ARGV[3]) ~= false
end

-- Note that the call's entry is executed.
local function enter()
  if ARGV[3] ~= '' then
    redis.call('ZADD', journal, redis.call('HINCRBY', control, 'entries', 1), ARGV[3])
    redis.call('ZREMRANGEBYRANK', journal, 1, -1 - JOURNAL) -- never the beginning of the epoch
  end
end

-- The newest version that was announced, and, if samplers hold it, the policy version. Neither goes back.
local function raise_version(version, is_published)
  for _, field in ipairs(is_published and {'announced', 'version'} or {'announced'}) do
    if version > number(field) then
      redis.call('HSET', control, field, version)
    end
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
    local last = redis.call('HMGET', control, 'set_back', 'clock')
    local set_back = (last[1] or 0) + math.max(0, (last[2] or 0) - clock)
    redis.call('HSET', control, 'clock', clock, 'set_back', set_back)
    moment = clock + set_back
  end
  return moment
end

local function group_key(group)
  return prefix .. 'group:' .. group
end

local function payload_key(group, index, nonce)
  return prefix .. 'payload:' .. group .. ':' .. index .. ':' .. nonce
end

local function wake(whom, most)
  redis.call('LPUSH', prefix .. 'wake:' .. whom, 1)
  redis.call('LTRIM', prefix .. 'wake:' .. whom, 0, most - 1)
end

-- What is known of each member of a group: 'bytes:nonce', or false for one that was not committed.
local function members_of(group)
  local fields = {}
  for index = 0, redis.call('HGET', group_key(group), 'size') - 1 do
    fields[index + 1] = 'm' .. index
  end
  return redis.call('HMGET', group_key(group), unpack(fields))
end

-- Delete payloads that are on this server; have a client delete those that are not.
local function delete_payloads(names)
  if #names > 0 and limits.payload_instances > 0 then
    redis.call('RPUSH', prefix .. 'garbage', unpack(names))
  elseif #names > 0 then
    redis.call('UNLINK', unpack(names))
  end
end

-- Let go of a group's payloads; the rest of it stays.
local function drop_payloads(group)
  local names = {}
  for position, member in ipairs(members_of(group)) do
    if member then
      names[#names + 1] = payload_key(group, position - 1, string.match(member, ':(.*)'))
    end
  end
  delete_payloads(names)
  redis.call('HINCRBY', control, 'bytes', 0 - redis.call('HGET', group_key(group), 'bytes')) -- not -x: '-0' for 0
  redis.call('HSET', group_key(group), 'bytes', 0)
  redis.call('ZREM', kept, group)
end

-- Forget a group, but for what became of it.
local function forget(group, outcome)
  drop_payloads(group)
  redis.call('UNLINK', group_key(group))
  redis.call('SET', prefix .. 'past:' .. group, outcome, 'EX', PAST_SECONDS)
end

-- Where a complete group stands among the ready ones. In fifo its ticket. Otherwise the moment of the first event of a
-- Poisson process of rate `weight` that begins at the horizon, the last place that was leased: for such processes the
-- order of first events is a weighted draw without replacement, and waiting longer does not change the odds.
local function place_of(group, ticket)
  local order = redis.call('HGET', control, 'order')
  if order == 'fifo' then
    return ticket
  end
  local weight = order == 'priority' and tonumber(redis.call('HGET', group_key(group), 'weight')) or 1
  local uniform = (tonumber(string.sub(redis.sha1hex(group .. ':' .. ticket), 1, 12), 16) + 0.5) / 2 ^ 48
  return (number('horizon') or 0) - math.log(uniform) / weight
end

-- Put a group where leases find it, in the place that its hash says.
local function add_ready(group)
  local place, oldest, born = unpack(redis.call('HMGET', group_key(group), 'place', 'oldest', 'born'))
  redis.call('ZADD', ready, place, group)
  redis.call('ZADD', ready_versions, oldest, group)
  redis.call('ZADD', ready_births, born, group)
  if redis.call('ZCARD', ready) >= limits.groups_per_batch or limits.tokens_per_batch then
    wake('ready', 1)
  end
end

-- Put a group back that was leased: in its old place, or, where the order is a draw, in one drawn anew, since places up
-- to the horizon are no part of the draw.
local function put_back(group)
  if redis.call('HGET', control, 'order') ~= 'fifo' then
    redis.call('HSET', group_key(group), 'place', place_of(group, redis.call('HINCRBY', control, 'tickets', 1)))
  end
  add_ready(group)
end

local function take_ready(group)
  redis.call('ZREM', ready, group)
  redis.call('ZREM', ready_versions, group)
  redis.call('ZREM', ready_births, group)
end

local function leave(group)
  redis.call('ZREM', reserved, group)
  redis.call('ZREM', running, group)
  redis.call('ZREM', leased, group)
  take_ready(group)
end

-- Issue a task again, unless it already had as many slots as it may have.
local function reissue(task)
  if redis.call('HINCRBY', prefix .. 'attempts', task, 1) < limits.max_attempts then
    redis.call('RPUSH', prefix .. 'retry', task)
  else
    redis.call('HDEL', prefix .. 'attempts', task)
    count('tasks_given_up')
  end
end

-- A group was trained as often as it may be. It stays until a checkpoint holds that, since a rollback puts it back.
local function settle(group)
  local key = group_key(group)
  local task, oldest, unsaved, bytes = unpack(redis.call('HMGET', key, 'task', 'oldest', 'unsaved', 'bytes'))
  leave(group)
  count('acked')
  redis.call('HDEL', prefix .. 'attempts', task)
  wake('slots', 64)
  if tonumber(unsaved) == 0 then
    return forget(group, 'acked')
  end
  redis.call('HSET', key, 'settled', 1)
  if tonumber(bytes) > 0 then
    redis.call('ZADD', kept, oldest, group)
  end
end

-- Take a group out of the buffer, count it under `outcome` and issue its task again, if it is `blameless` without
-- charging it with an attempt. One that was trained before has served its purpose and counts as acked: return false.
local function discard(group, outcome, blameless)
  local task, uses = unpack(redis.call('HMGET', group_key(group), 'task', 'uses'))
  if tonumber(uses) > 0 then
    settle(group)
    return false
  end
  leave(group)
  forget(group, outcome)
  count(outcome)
  wake('slots', 64)
  if blameless then
    redis.call('RPUSH', prefix .. 'retry', task)
  else
    reissue(task)
  end
  return true
end

-- Why a group is too stale to be trained with `version`: 'version', 'age', or nil if it is not. `oldest` is the oldest
-- version among its sampled tokens, nil if there are none yet. None of them is older than its slot, whose age is the
-- bound of theirs.
local function why_stale(oldest, born, version)
  if oldest and version - oldest > limits.max_staleness then
    return 'version'
  elseif now() - born > (limits.max_age_ms or math.huge) then
    return 'age'
  end
end

-- `stale:age` counts those of the `stale` that only their age made so.
local function discard_stale(group, why)
  if discard(group, 'stale') and why == 'age' then
    count('stale:age')
  end
end

-- The members that are in make a group, the others are given up.
local function complete(group)
  local key = group_key(group)
  local size, done, bytes, ticket = unpack(redis.call('HMGET', key, 'size', 'done', 'bytes', 'ticket'))
  redis.call('ZREM', reserved, group)
  redis.call('ZREM', running, group)
  redis.call('HSET', key, 'place', place_of(group, ticket))
  local mean = number('group_bytes') or tonumber(bytes)
  redis.call('HSET', control, 'group_bytes', math.ceil(mean + (bytes - mean) / 32))
  if tonumber(done) < tonumber(size) then
    count('short_groups')
  end
  add_ready(group)
end

-- End an open slot whose worker does not go on with it; enough members make a group nevertheless.
local function close_slot(group, outcome, blameless)
  if tonumber(redis.call('HGET', group_key(group), 'done')) >= limits.min_group_size then
    complete(group)
    return false
  end
  return discard(group, outcome, blameless)
end

-- End slots whose deadline has passed; the rest of a long queue is left to the next call.
local function sweep()
  local late = redis.call('ZRANGEBYSCORE', reserved, '-inf', now(), 'LIMIT', 0, SWEEP)
  for _, group in ipairs(late) do
    close_slot(group, 'expired')
  end
end

-- Put every group of a lease back where the next lease finds it.
local function redeliver(groups)
  for _, group in ipairs(groups) do
    redis.call('ZREM', leased, group)
    redis.call('HDEL', group_key(group), 'shard', 'correction')
    put_back(group)
    count('redelivered')
  end
end
