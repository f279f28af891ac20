-- Prepended to every script, as far as it needs it, behind the tables of keys that the script's own comment declares. A
-- blank line ends a definition, so there is none within one.
--
-- `q` is a queue as one group sees it: its shared keys and that group's own; `groups` is the list of all groups' own
-- keys, where a script declares `each.…`. DEFAULTS are the limits of a queue that nobody configured. A lease is a field of
-- `state`: token -> the number it was given and its consumer, then the ids it still holds, a line each.
--
-- Every script: the server's time only; a constant number of calls a batch; the first write needs no memory wherever it
-- must work at maxmemory, since Redis refuses a growing command only as long as nothing was written. A write goes to the
-- file and to replicas as a command of its own, which costs as much again: there are as few as can be.
local call = redis.call

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Digits of a whole number; `..` would round above 1e14.
local function text(number)
  return string.format('%.0f', number)
end

-- A number above all given out before, also when the server of before was ahead of a failover's copy.
local function above(last, now)
  return text(math.max(tonumber(last or 0) + 1, now * 1000))
end

-- The lines of a text.
local function lines_of(joined)
  local lines = {}
  for line in string.gmatch(joined, '[^\n]+') do lines[#lines + 1] = line end
  return lines
end

-- The reply of this very call, if it is a repeated one that was carried out before.
local function earlier(run)
  if AGAIN == '0' then return nil end
  local stored = call('HGET', run.replay, CALL)
  if not stored or string.sub(stored, 1, #SEQUENCE + 1) ~= SEQUENCE .. '\n' then return nil end
  return lines_of(string.sub(stored, #SEQUENCE + 2))
end

-- Stores a reply of texts without line breaks. A client's replies stay for an hour or two after its last call, longer
-- than it repeats one. Looking is cheaper than setting it each time, which goes to the file and to replicas.
local function keep(run, reply)
  call('HSET', run.replay, CALL, SEQUENCE .. '\n' .. table.concat(reply, '\n'))
  if call('PTTL', run.replay) < 3600000 then call('PEXPIRE', run.replay, 7200000) end
  return reply
end

-- Wakes one waiting lease call; the list is a hint and never grows.
local function wake(group)
  if call('LLEN', group.wake) < 4 then call('RPUSH', group.wake, '1') end
end

-- Opens or shuts the room; producers that wait for it are woken, the first 64 at once.
local function set_full(q, full)
  call('UNLINK', q.room)
  call('HSET', q.ctl, 'full', full and '1' or '0')
  if full then return end
  local tokens = {}
  for i = 1, 64 do tokens[i] = '1' end
  call('RPUSH', q.room, unpack(tokens))
end

-- What the queue's `ctl` says of its state and limits.
local function read_ctl(q)
  local told = call('HMGET', q.ctl, 'closed', 'groups', 'full', 'stored', 'max_depth', 'high_count', 'high_bytes',
    'low_count', 'low_bytes')
  return {
    closed = told[1] == '1', groups = told[2], full = told[3] == '1', stored = tonumber(told[4] or 0),
    max_depth = tonumber(told[5] or DEFAULTS.max_depth),
    high_count = tonumber(told[6] or DEFAULTS.high_count), high_bytes = tonumber(told[7] or DEFAULTS.high_bytes),
    low_count = tonumber(told[8] or DEFAULTS.low_count), low_bytes = tonumber(told[9] or DEFAULTS.low_bytes),
  }
end

-- Looks at the room again, with hysteresis, when `depth` items take it.
local function update_room(q, ctl, depth)
  local now_full = depth >= ctl.high_count or ctl.stored >= ctl.high_bytes
  now_full = now_full or ctl.full and (depth > ctl.low_count or ctl.stored > ctl.low_bytes)
  if now_full ~= ctl.full then set_full(q, now_full) end
end

-- Adds the stored bytes of `ids` to the queue's sum.
local function count_stored(q, ids)
  local sum = 0
  for _, bytes in ipairs(call('HMGET', q.bytes, unpack(ids))) do sum = sum + tonumber(bytes or 0) end
  if sum > 0 then call('HINCRBY', q.ctl, 'stored', text(sum)) end
end

-- Gives `ids` the next places in put order: behind the last one that is taken, since order is among those alone. A
-- place is the time of the put in microseconds, so that the head's tells how long it has waited.
local function place(q, ids)
  local first, places = above(call('ZRANGE', q.seq, -1, -1, 'WITHSCORES')[2], now_ms()), {}
  for i, id in ipairs(ids) do
    places[2 * i - 1], places[2 * i] = text(first + i - 1), id
  end
  call('ZADD', q.seq, unpack(places))
end

-- Of `ids` on their way back to ready, those whose tensors are there; the others are parked until they are made again.
local function with_tensors(q, ids)
  if call('EXISTS', q.recalled) == 0 then return ids end
  local there, gone = {}, {}
  for i, recalled in ipairs(call('SMISMEMBER', q.recalled, unpack(ids))) do
    table.insert(recalled == 1 and gone or there, ids[i])
  end
  if #gone > 0 then call('SADD', q.parked, unpack(gone)) end
  return there
end

-- Puts new items {id, payload, digest, stored bytes} at the tail, for every group; `ctl` and `depth` are of before.
local function add(q, groups, items, ctl, depth)
  local ids, sized, digests, payloads, pending, sum = {}, {}, {}, {}, {}, 0
  for i, item in ipairs(items) do
    local id, k = item[1], 2 * i - 1
    ids[i] = id
    payloads[k], payloads[k + 1] = id, item[2]
    digests[k], digests[k + 1] = id, item[3]
    pending[k], pending[k + 1] = id, #groups
    if item[4] ~= '0' then
      sized[#sized + 1], sized[#sized + 2] = id, item[4]
      sum = sum + tonumber(item[4])
    end
  end
  call('HSET', q.digest, unpack(digests))
  call('HSET', q.ref, unpack(payloads))
  if #groups > 1 then call('HSET', q.pending, unpack(pending)) end
  if #sized > 0 then
    call('HSET', q.bytes, unpack(sized))
    ctl.stored = ctl.stored + sum
    call('HSET', q.ctl, 'stored', text(ctl.stored))
  end
  place(q, ids)
  for _, group in ipairs(groups) do
    call('RPUSH', group.ready, unpack(ids))
    wake(group)
  end
  update_room(q, ctl, depth + #items)
end
