"use strict";
// Everything from the server goes through textContent; nothing here makes markup from strings.
const $ = id => document.getElementById(id);
const el = (tag, text, cls) => { const e = document.createElement(tag); if (text != null) e.textContent = String(text); if (cls) e.className = cls; return e; };
const list = (where, pairs) => where.replaceChildren(...pairs.filter(p => p[1] != null).flatMap(([k, v, cls]) => [el("dt", k), el("dd", v, cls)]));
const count = n => n == null ? "–" : Math.round(n).toLocaleString("en");
const rate = n => n == null ? "–" : n > 0 && n < 9.95 ? n.toFixed(1) : count(n);
const millis = n => n == null ? "–" : n < 10 ? `${n.toFixed(1)} ms` : n < 1000 ? `${Math.round(n)} ms` : duration(n / 1000);
const duration = s => s == null ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : s < 10 ? `${s.toFixed(1)} s` : s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
const bytes = n => n == null ? "" : n < 1024 ? `${n} B` : n < 1048576 ? `${(n / 1024).toFixed(1)} KiB` : `${(n / 1048576).toFixed(1)} MiB`;

const KEPT = 450, PERIOD = 2000;
let token = sessionStorage.getItem("outboxd-token") ?? "", samples = [], live = null, stored = null, storedError = null;
let picked = new Map(), shown = [], after = null, asked = 0, answered = 0;

async function api(path, body) {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const init = { headers, cache: "no-store", signal: AbortSignal.timeout(45000) };
  if (body !== undefined) { init.method = "POST"; init.body = JSON.stringify(body); headers["content-type"] = "application/json"; }
  const r = await fetch(`api/${path}`, init);
  const answer = await r.json().catch(() => ({}));
  if (!r.ok) { const e = new Error(answer.detail ?? answer.title ?? r.statusText); e.status = r.status; e.trouble = answer.trouble; throw e; }
  return answer;
}

function say(text, cls) { $("said").textContent = text; $("said").className = cls ?? ""; }
function confirmed(text) {
  return new Promise(resolve => {
    const dialog = $("ask"); let yes = false;
    $("ask-text").textContent = text;
    $("ask-yes").onclick = () => { yes = true; dialog.close(); };
    dialog.addEventListener("close", () => resolve(yes), { once: true });
    dialog.showModal();
  });
}
function setToken(value) {
  token = value;
  if (token) sessionStorage.setItem("outboxd-token", token); else sessionStorage.removeItem("outboxd-token");
  $("token-state").textContent = token ? "token set" : "read only";
}
function openToken() { $("token").value = token; $("token-dialog").showModal(); $("token").focus(); }

// Orders -------------------------------------------------------------------------------------------
async function order(path, body, question) {
  if (question && !await confirmed(question)) return;
  say("…", "dim");
  try {
    say((await api(path, body ?? {})).detail ?? "done", "good");
  } catch (e) {
    say(e.status ? e.message : "no answer from this instance", "bad");
    if (e.status === 401) { setToken(""); openToken(); }
  }
  await Promise.all([pollLive(), pollStored(), showRows()]);
}
const pathOf = r => `rows/${encodeURIComponent(r.table)}/${encodeURIComponent(r.id)}`;
const keyOf = r => JSON.stringify([r.table, r.id]);
async function orderMany(kind) {
  const rows = [...picked.values()], tables = Map.groupBy ? Map.groupBy(rows, r => r.table) : rows.reduce((m, r) => m.set(r.table, [...(m.get(r.table) ?? []), r]), new Map());
  if (!rows.length) return;
  if (kind === "abandon" && !await confirmed(`Abandon ${rows.length} rows? They are never published then.`)) return;
  for (const [table, of] of tables) await order(`rows/${kind}`, { table, ids: of.map(r => r.id) });
  picked.clear(); pickedChanged();
}
const abandonOne = r => order(`${pathOf(r)}/abandon`, {}, `Abandon row ${r.id} of ${r.table}? It is never published then.`);

// What this instance sees --------------------------------------------------------------------------
async function pollLive() {
  try {
    live = await api(`live?after=${samples.at(-1)?.at ?? 0}`);
    const newest = samples.at(-1)?.at ?? 0;
    samples = [...samples, ...live.samples.filter(s => s.at > newest)].slice(-KEPT);
    answered = Date.now();
  } catch (e) {
    if (e.status === 401) { needToken(e); return; }
    live = null;
    $("ready").textContent = "no answer"; $("ready").className = "pill bad";
  }
  draw();
}
function needToken(e) { $("ready").textContent = "token needed"; $("ready").className = "pill warn"; say(e.message, "warn"); }

async function pollStored() {
  const mine = ++asked;
  try {
    const got = await api("status");
    if (mine !== asked) return;
    stored = got; storedError = null;
  } catch (e) { if (mine === asked) storedError = e; }
  drawStored();
}

function draw() {
  drawTroubles();
  $("age").textContent = answered ? `${live ? "live" : "last answer"} ${new Date(answered).toLocaleTimeString()}` : "";
  if (!live) return;
  $("ready").textContent = live.ready ? "ready" : "not ready"; $("ready").className = `pill ${live.ready ? "good" : "bad"}`;
  $("who").textContent = `${live.role} · ${live.instance}`;
  document.title = `${live.ready ? "" : "! "}outboxd${stored ? ` · ${stored.name}` : ""}`;
  $("plots-h").textContent = `Last ${Math.round(Math.max(60, samples.length) * PERIOD / 60000)} minutes`;
  const leads = live.role === "leader", last = samples.at(-1);
  $("mysql").textContent = live.mysql.detail; $("stop-mysql").classList.toggle("down", !live.mysql.ok);
  $("lag").textContent = leads ? duration(live.lag_seconds) : "–";
  $("window").textContent = leads ? `${count(live.in_flight_rows ?? 0)} of ${count(live.max_in_flight)} rows, ${bytes(live.in_flight_bytes ?? 0)}` : "idle here";
  $("fill").value = (live.in_flight_rows ?? 0) / live.max_in_flight;
  $("stream").textContent = leads ? live.tail.detail + (live.held_aggregates ? `, ${count(live.held_aggregates)} aggregates held` : "") : "";
  $("stop-window").classList.toggle("down", leads && !live.tail.ok);
  $("rate").textContent = last ? rate(last.tail + last.poller) : "–";
  $("rabbit").textContent = leads ? live.rabbitmq.detail : "used by the leader"; $("stop-rabbit").classList.toggle("down", leads && !live.rabbitmq.ok);
  plot("plot-rate", [["", s => s.tail], ["b", s => s.poller]], "rate-now", last && `${rate(last.tail)} + ${rate(last.poller)}`, n => `${rate(n)} rows/s`);
  const recent = samples.findLast?.(s => s.p50_ms != null);
  plot("plot-latency", [["", s => s.p50_ms], ["b", s => s.p95_ms], ["c", s => s.p99_ms]], "latency-now", recent ? `${millis(recent.p50_ms)} · ${millis(recent.p95_ms)} · ${millis(recent.p99_ms)}` : "no rows yet", millis);
  plot("plot-lag", [["", s => s.lag_seconds]], "lag-now", last && duration(last.lag_seconds), duration);
}

function plot(id, lines, nowId, now, unit) {
  const svg = $(id), span = Math.max(60, samples.length), values = lines.map(([, f]) => samples.map(f)), top = Math.max(1e-9, ...values.flat().filter(v => v != null));
  svg.replaceChildren();
  lines.forEach(([cls], i) => {
    // A sample without a value interrupts the line; a lone one is drawn as a short dash.
    const runs = []; let run = null;
    values[i].forEach((v, at) => { if (v == null) { run = null; return; } if (!run) runs.push(run = []); run.push([(span - samples.length + at + 1) / span * 450, 58 - v / top * 54]); });
    for (const points of runs) {
      if (points.length === 1) points.push([points[0][0] + 1.5, points[0][1]]);
      const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      line.setAttribute("points", points.map(p => p.map(n => n.toFixed(1)).join(",")).join(" "));
      line.setAttribute("class", cls); svg.append(line);
    }
  });
  $(nowId).textContent = now ?? "–";
  const name = svg.getAttribute("aria-label").split(";")[0];
  svg.setAttribute("aria-label", `${name}; now ${now ?? "unknown"}, highest ${top > 1e-9 ? unit(top) : "none"}`);
}

function drawTroubles() {
  let troubles = stored && !storedError ? stored.live.troubles : live?.troubles ?? [];
  // What the instance itself says is newer than what was stored.
  if (live && stored && !storedError) { const own = new Set(["starting", "halted", "mysql", "rabbitmq", "rabbitmq_blocked", "tail"]); troubles = [...live.troubles.filter(t => own.has(t.code)), ...troubles.filter(t => !own.has(t.code))]; }
  if (!live) troubles = [{ code: "no_answer", severity: "error", text: "this instance does not answer", runbook: "" }];
  else if (storedError) troubles = [...troubles, storedError.trouble ?? { code: "stored", severity: "warning", text: storedError.message, runbook: "" }];
  const key = JSON.stringify(troubles);
  $("trouble").hidden = !troubles.length;
  // Rewritten only when something changed: a screen reader would read it all again.
  if ($("troubles").dataset.key === key) return;
  $("troubles").dataset.key = key;
  $("troubles").replaceChildren(...troubles.map(t => {
    const li = el("li", t.text, t.severity);
    if (/^runbook#[\w-]+$/.test(t.runbook)) { const a = el("a", "What to do"); a.href = t.runbook; a.setAttribute("aria-label", `What to do: ${t.text}`); li.append(a); }
    return li;
  }));
}

// What is stored -----------------------------------------------------------------------------------
function drawStored() {
  drawTroubles();
  if (!stored) return;
  const s = stored;
  $("name").textContent = `outboxd · ${s.name}`;
  list($("place"), [
    ["leader", s.leader ?? "none", s.leader ? "" : "bad"],
    ["standing by", s.standbys.join(", ") || "none"],
    ["epoch", s.epoch],
    ["stored", s.position ?? "none yet", "position"],
    ["age", duration(s.position_age_seconds)],
    ["behind", s.lag.transactions != null ? `${count(s.lag.transactions)} transactions of the server` : s.lag.bytes != null ? bytes(s.lag.bytes) : null],
    ["gaps", s.gaps.length ? s.gaps.map(g => `${g.found_at} UTC: ${g.reason}`).join("\n") : "none", s.gaps.length ? "bad" : ""],
    ["paused", s.paused ? "everything" : s.paused_tables.join(", ") || "no", s.paused || s.paused_tables.length ? "warn" : ""],
  ]);
  $("gap-actions").hidden = !s.gaps.length;
  $("pause").textContent = s.paused || s.paused_tables.length ? "Resume" : "Pause";
  $("backlog").replaceChildren(...s.backlog.map(b => {
    const tr = el("tr");
    const cell = (label, text, cls) => { const td = el("td", text, cls); td.dataset.label = label; return td; };
    tr.append(el("td", b.table + (b.parked ? " (parked)" : "")), ...[["pending", "pending"], ["processing", "claimed"], ["failed", "failed"], ["abandoned", "abandoned"]].map(([k, label]) => cell(label, count(b[k]), `n${k === "failed" && b[k] ? " bad" : ""}`)), cell("oldest", duration(b.oldest_pending_seconds), "n"));
    return tr;
  }));
  const tables = s.backlog.map(b => b.table), select = $("f-table");
  if ([...select.options].map(o => o.value).join() !== ["", ...tables].join()) {
    const was = select.value;
    select.replaceChildren(...["", ...tables].map(t => { const o = el("option", t || "all"); o.value = t; return o; }));
    select.value = tables.includes(was) ? was : "";
  }
}

// Rows ---------------------------------------------------------------------------------------------
let listing = 0;
async function showRows() {
  const mine = ++listing, query = new URLSearchParams({ limit: 50 });
  for (const [name, id] of [["status", "f-status"], ["table", "f-table"], ["aggregate_id", "f-aggregate"]]) if ($(id).value) query.set(name, $(id).value);
  if (after) query.set("after", after);
  let page;
  try { page = await api(`rows?${query}`); } catch (e) { if (e.status === 401) needToken(e); return; }
  if (mine !== listing) return;
  const key = JSON.stringify(page);
  if ($("rows").dataset.key === key) return;
  $("rows").dataset.key = key;
  shown = page.rows;
  picked = new Map(shown.filter(r => picked.has(keyOf(r))).map(r => [keyOf(r), r]));
  const focus = document.activeElement?.dataset?.focus;
  $("rows").replaceChildren(...shown.map(rowOf));
  if (focus) document.querySelector(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
  $("no-rows").hidden = shown.length > 0;
  $("next").hidden = !page.next && !after;
  $("next").textContent = page.next ? "Next page" : "Back to the newest"; $("next").dataset.after = page.next ?? "";
  pickedChanged();
}
function rowOf(r) {
  const tr = el("tr"), pick = el("input"), key = keyOf(r), acts = el("td"), box = el("div", null, "actions");
  pick.type = "checkbox"; pick.checked = picked.has(key); pick.setAttribute("aria-label", `Select row ${r.id}`); pick.dataset.focus = `pick ${key}`;
  pick.addEventListener("change", () => { if (pick.checked) picked.set(key, r); else picked.delete(key); pickedChanged(); });
  const button = (label, cls, act) => { const b = el("button", label, cls); b.type = "button"; b.setAttribute("aria-label", `${label} row ${r.id}`); b.dataset.focus = `${label} ${key}`; b.addEventListener("click", act); box.append(b); };
  button("View", "", () => view(r));
  if (r.status === "failed") button("Retry", "", () => order(`${pathOf(r)}/retry`));
  if (r.status === "failed" || r.status === "pending") button("Abandon", "danger", () => abandonOne(r));
  acts.append(box);
  const cell = (label, text, cls) => { const td = el("td", text, cls); td.dataset.label = label; return td; };
  const first = el("td"); first.append(pick);
  tr.dataset.id = r.id;
  tr.append(first, cell("row", stored?.backlog.length > 1 ? `${r.table} ${r.id}` : r.id), cell("aggregate", [r.aggregate_type, r.aggregate_id].filter(Boolean).join(" ")), cell("event", r.event_type), cell("status", r.status + (r.retry_count ? `, ${r.retry_count} retries` : "")), cell("reason", r.last_error ?? "–"), acts);
  return tr;
}
function pickedChanged() {
  const rows = [...picked.values()];
  $("retry-picked").disabled = !rows.some(r => r.status === "failed"); $("abandon-picked").disabled = !rows.some(r => r.status === "failed" || r.status === "pending");
  $("pick-all").checked = shown.length > 0 && picked.size === shown.length;
  $("pick-all").indeterminate = picked.size > 0 && picked.size < shown.length;
}
async function view(r) {
  let d;
  try { d = await api(pathOf(r)); } catch (e) { say(e.message, "bad"); return; }
  $("detail-h").textContent = `Row ${d.id} of ${d.table}`;
  const { columns, table, id, parked, ...rest } = d;
  list($("detail-list"), Object.entries(rest).map(([k, v]) => [k, v === "" ? null : v]));
  // JSON is shown as it is stored, never parsed and printed again: numbers would change.
  const payload = columns.payload ?? columns;
  $("payload").textContent = typeof payload === "string" ? payload : JSON.stringify(payload, null, 2);
  $("detail-retry").hidden = d.status !== "failed"; $("detail-abandon").hidden = d.status !== "failed" && d.status !== "pending";
  $("detail-retry").onclick = () => { $("detail").close(); order(`${pathOf(d)}/retry`); };
  $("detail-abandon").onclick = () => { $("detail").close(); abandonOne(d); };
  $("detail").showModal();
}

// Hands --------------------------------------------------------------------------------------------
for (const b of document.querySelectorAll("[data-post]")) b.addEventListener("click", () => order(b.dataset.post, {}, b.dataset.ask));
for (const b of document.querySelectorAll("[data-close]")) b.addEventListener("click", () => b.closest("dialog").close());
const togglePause = () => stored?.paused || stored?.paused_tables.length ? order("resume") : order("pause", {}, "Pause publishing? Rows wait until it is resumed.");
$("pause").addEventListener("click", togglePause);
$("retry-picked").addEventListener("click", () => orderMany("retry"));
$("abandon-picked").addEventListener("click", () => orderMany("abandon"));
$("retry-all").addEventListener("click", () => order("rows/retry", { all_failed: true, table: $("f-table").value || null }, "Retry every failed row?"));
$("pick-all").addEventListener("change", e => { picked = new Map(e.target.checked ? shown.map(r => [keyOf(r), r]) : []); $("rows").dataset.key = ""; showRows(); });
$("filter").addEventListener("submit", e => { e.preventDefault(); after = null; picked.clear(); showRows(); });
for (const id of ["f-status", "f-table"]) $(id).addEventListener("change", () => { after = null; picked.clear(); showRows(); });
$("next").addEventListener("click", () => { after = $("next").dataset.after || null; picked.clear(); showRows(); $("rows-h").focus(); });
$("token-open").addEventListener("click", openToken);
$("token-form").addEventListener("submit", e => { e.preventDefault(); setToken($("token").value.trim()); $("token").value = ""; $("token-dialog").close(); say(""); refresh(); });
document.addEventListener("keydown", e => {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input, select, textarea, dialog")) return;
  const act = { r: refresh, f: () => $("f-status").focus(), p: togglePause, t: openToken }[e.key];
  if (act) { e.preventDefault(); act(); }
});

const refresh = () => Promise.all([pollLive(), pollStored(), showRows()]);
// Each kind waits for its own answer: a slow database does not pile up requests.
function every(period, work) { const again = async () => { if (!document.hidden) await work().catch(() => {}); setTimeout(again, period); }; setTimeout(again, period); }
setToken(token);
refresh();
every(PERIOD, pollLive); every(PERIOD * 1.5, pollStored); every(PERIOD * 2.5, showRows);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
