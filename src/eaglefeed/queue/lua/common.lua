-- Prepended to every script, behind DEFAULTS (the limits of a queue that nobody configured) and the tables of keys that
-- the script's own comment declares. `q` is one queue's table of keys.
--
-- Every script: the server's time only; a constant number of calls a batch; the first write frees memory wherever it
-- must work at maxmemory, since Redis refuses a growing command only as long as nothing was written.
local call = redis.call

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Digits of a whole number; `..` would round above 1e14.
local function text(number)
  return string.format('%.0f', number)
end

-- Wakes one waiting lease call; the list is a hint and never grows.
local function wake(q)
  if call('LLEN', q.wake) < 4 then call('RPUSH', q.wake, '1') end
end

-- Sets or clears ctl.full by count and stored bytes, with hysteresis.
local function update_room(q)
  local names = {'high_count', 'high_bytes', 'low_count', 'low_bytes'}
  local ctl = call('HMGET', q.ctl, 'full', 'stored', unpack(names))
  local full, depth, stored = ctl[1] == '1', call('ZCARD', q.seq), tonumber(ctl[2] or 0)
  local limits = {}
  for i, name in ipairs(names) do limits[name] = tonumber(ctl[i + 2] or DEFAULTS[name]) end
  local now_full = depth >= limits.high_count or stored >= limits.high_bytes
  now_full = now_full or full and (depth > limits.low_count or stored > limits.low_bytes)
  if now_full ~= full then call('HSET', q.ctl, 'full', now_full and '1' or '0') end
end

-- Adds the stored bytes of `ids` to the queue's sum (sign 1) or takes them off (sign -1).
local function count_stored(q, ids, sign)
  local sum = 0
  for _, bytes in ipairs(call('HMGET', q.bytes, unpack(ids))) do sum = sum + tonumber(bytes or 0) end
  if sum > 0 then call('HINCRBY', q.ctl, 'stored', text(sign * sum)) end
end

-- Puts new items {id, payload, digest, stored bytes} at the tail.
local function add(q, items)
  local last, ids, sized = call('HINCRBY', q.ctl, 'seq', #items), {}, {}
  local digests, payloads, places = {}, {}, {}
  for i, item in ipairs(items) do
    local id, k = item[1], 2 * i - 1
    ids[i] = id
    payloads[k], payloads[k + 1] = id, item[2]
    digests[k], digests[k + 1] = id, item[3]
    places[k], places[k + 1] = text(last - #items + i), id
    if item[4] ~= '0' then
      sized[#sized + 1] = id
      sized[#sized + 1] = item[4]
    end
  end
  call('HSET', q.digest, unpack(digests))
  call('HSET', q.ref, unpack(payloads))
  call('ZADD', q.seq, unpack(places))
  if #sized > 0 then call('HSET', q.bytes, unpack(sized)) end
  call('RPUSH', q.ready, unpack(ids))
  count_stored(q, ids, 1)
  update_room(q)
  wake(q)
end

-- Which of `ids` the lease holds: a list of 1 and 0, and those ids. A repeated id is held once.
local function held_by(q, token, ids)
  local flags, mine, seen = {}, {}, {}
  for i, owner in ipairs(call('HMGET', q.owner, unpack(ids))) do
    local id = ids[i]
    local held = owner == token and not seen[id]
    flags[i] = held and 1 or 0
    if held then
      seen[id] = true
      mine[#mine + 1] = id
    end
  end
  return flags, mine
end

-- Takes `ids` out of their lease; the lease ends with its last one.
local function release(q, token, ids)
  call('HDEL', q.owner, unpack(ids))
  if call('HINCRBY', q.open, token, -#ids) <= 0 then
    call('ZREM', q.leases, token)
    call('HDEL', q.lease, token)
    call('HDEL', q.open, token)
  end
end

-- Forgets done items but for their digest.
local function settle(q, ids)
  call('ZREM', q.seq, unpack(ids))
  count_stored(q, ids, -1)
  for _, key in ipairs({q.ref, q.bytes, q.deliveries, q.crashes, q.errors}) do call('HDEL', key, unpack(ids)) end
  update_room(q)
end

-- Makes items dead letters; their payload, bytes and delivery count stay.
local function bury(q, ids, reasons)
  local fields = {}
  for i, id in ipairs(ids) do
    fields[2 * i - 1], fields[2 * i] = id, reasons[i]
  end
  call('ZREM', q.seq, unpack(ids))
  call('HSET', q.dead, unpack(fields))
  count_stored(q, ids, -1)
  update_room(q)
end

-- Puts ids to the head of the ready items, in their order.
local function push_head(q, ids)
  local reversed = {}
  for i = #ids, 1, -1 do reversed[#reversed + 1] = ids[i] end
  call('LPUSH', q.ready, unpack(reversed))
  wake(q)
end
