-- commit: admit staged payloads, each as one member of its group.
-- Invariant: a member is admitted at most once per (group, index), and only into an open slot; a payload that is not
-- admitted is deleted. Payload bytes never enter Lua: the caller has SET them, each under a name of its own with a time
-- to live, before this script in the same pipeline, or on a payload instance.
-- A slot past its deadline that nobody has swept yet is still open: the work is done, so it is taken.
-- Payloads that are elsewhere the caller keeps, when it has the answer that they were admitted. One that lost its
-- connection before that commits again, and is told which payload to keep: duplicate:<nonce>.
-- ARGV: payload instances, then for each payload: group, index, nonce, bytes, oldest version among its sampled tokens,
-- tokens, weight
if not is_open() then
  return {'not_open'}
end
if limits.payload_instances ~= tonumber(ARGV[1]) then
  return {'instances', limits.payload_instances}
end
local here, version = limits.payload_instances == 0, number('version')
local answers, stored = {'ok'}, 0

-- Admit payloads of one group: read it once, write it once. Fill `answers`.
local function admit(group, payloads)
  local key = group_key(group)
  local fields = {'size', 'done', 'dropped', 'bytes', 'tokens', 'oldest', 'weight', 'born'}
  for _, payload in ipairs(payloads) do
    fields[#fields + 1] = 'm' .. payload.index
    fields[#fields + 1] = 'd' .. payload.index
  end
  local state = redis.call('HMGET', key, unpack(fields))
  local size, done, dropped = tonumber(state[1]), tonumber(state[2]), tonumber(state[3])
  local bytes, tokens, oldest, weight = tonumber(state[4]), tonumber(state[5]), tonumber(state[6]), tonumber(state[7])
  local open, stale, changes, known = redis.call('ZSCORE', reserved, group), nil, {}, {}
  local past = not size and redis.call('GET', prefix .. 'past:' .. group)

  local function judge(position, payload)
    local member = known[payload.index] or state[7 + 2 * position]
    if not size then
      return past == 'acked' and 'duplicate' or past == 'stale' and 'stale' or 'expired'
    elseif payload.index >= size then
      return 'index'
    elseif member then
      return member == payload.member and 'accepted' or 'duplicate' .. string.match(member, ':.*')
    elseif stale then
      return 'stale'
    elseif state[8 + 2 * position] or not open then
      return 'expired'
    end
    stale = why_stale(payload.oldest, state[8], version)
    if stale then
      return 'stale'
    elseif here and redis.call('PERSIST', payload_key(group, payload.index, payload.nonce)) == 0 then
      return 'unstaged'
    end
    known[payload.index] = payload.member
    changes[#changes + 1] = 'm' .. payload.index
    changes[#changes + 1] = payload.member
    done, bytes, tokens = done + 1, bytes + payload.bytes, tokens + payload.tokens
    oldest = math.min(oldest or payload.oldest, payload.oldest)
    if weight or payload.weight ~= 1 then -- their mean; usually all are 1 and none is stored
      weight = (weight or 1) + (payload.weight - (weight or 1)) / done
    end
    stored = stored + payload.bytes
    return 'accepted'
  end

  for position, payload in ipairs(payloads) do
    local answer = judge(position, payload)
    if answer ~= 'accepted' and answer ~= 'unstaged' then
      delete_payloads({payload_key(group, payload.index, payload.nonce)})
    end
    answers[#answers + 1] = answer
  end
  if #changes > 0 then
    redis.call('HSET', key, 'done', done, 'bytes', bytes, 'tokens', tokens, 'oldest', oldest, unpack(changes))
    if weight then
      redis.call('HSET', key, 'weight', weight)
    end
  end
  if stale then
    redis.call('HINCRBY', control, 'bytes', stored) -- before they are taken off again
    stored = 0
    discard_stale(group, stale)
  elseif #changes > 0 and done == size - dropped then
    complete(group)
  end
end

local at = 2
while at <= #ARGV do
  local group, payloads = ARGV[at], {}
  repeat
    local bytes, nonce = tonumber(ARGV[at + 3]), ARGV[at + 2]
    payloads[#payloads + 1] = {index = tonumber(ARGV[at + 1]), nonce = nonce, bytes = bytes, member = bytes .. ':' .. nonce,
      oldest = tonumber(ARGV[at + 4]), tokens = tonumber(ARGV[at + 5]), weight = tonumber(ARGV[at + 6])}
    at = at + 7
  until ARGV[at] ~= group
  admit(group, payloads)
end
if stored > 0 then
  redis.call('HINCRBY', control, 'bytes', stored)
end
return answers
