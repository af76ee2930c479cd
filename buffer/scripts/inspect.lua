-- inspect: describe up to so many groups of one state, those first that are leased, expire or are forgotten first.
-- It changes nothing but the clock that it reads.
-- ARGV: state (reserved, ready, leased or kept), most groups
if not is_open() then
  return {'not_open'}
end
local rows = {'ok', now()}
for _, group in ipairs(redis.call('ZRANGE', prefix .. ARGV[1], 0, ARGV[2] - 1)) do
  local row = redis.call('HMGET', group_key(group), 'task', 'worker', 'version', 'oldest', 'born', 'size', 'bytes',
    'tokens', 'uses')
  row[10] = redis.call('ZSCORE', prefix .. ARGV[1], group)
  for position = 1, 10 do
    row[position] = row[position] or ''
  end
  rows[#rows + 1] = {group, row, members_of(group)}
end
return rows
