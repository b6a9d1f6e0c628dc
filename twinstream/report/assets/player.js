"use strict";
// A figure whose layout has `meta.plays` is played back: a line goes along its time axis, and what runs stands below.
const PLAYED_MS = 15000; // what the time axis shows, so zooming in is slow motion
const MOST_LANES = 12;
const lastAt = (times, time) => {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
};
// What each lane runs at a time, by chart; and how much is in each memory.
const playedAt = (element, time) => {
  const lanes = new Map(), memories = new Map();
  for (const trace of element._fullData) {
    if (trace.type === "bar") {
      const { tickvals, ticktext } = element._fullLayout[trace.yaxis.replace("y", "yaxis")];
      const lane = (y) => (ticktext ? ticktext[tickvals.indexOf(y)] : y);
      trace.base.forEach((start, i) => {
        if (start <= time && time < start + trace.x[i]) {
          lanes.set(`${trace.yaxis} ${trace.y[i]}`, [lane(trace.y[i]), trace.hovertext[i].split("<br>")[0].replace(/<[^>]*>/g, "")]);
        }
      });
    } else if (trace.stackgroup) {
      const at = Math.max(0, lastAt(trace.x, time));
      memories.set(trace.stackgroup, (memories.get(trace.stackgroup) ?? 0) + trace.y[at]);
    }
  }
  return { lanes: [...lanes.values()], memories: [...memories.values()] };
};
const toldAt = (element, time) => {
  const { unit, size } = element.layout.meta.plays;
  const { lanes, memories } = playedAt(element, time);
  const words = lanes.slice(0, MOST_LANES).map(([lane, name]) => `${lane}: ${name}`);
  if (lanes.length > MOST_LANES) words.push(`and ${lanes.length - MOST_LANES} more`);
  if (memories.length) words.push(`${size} on the device ${memories[0].toFixed(2)}, on the host ${(memories[1] ?? 0).toFixed(2)}`);
  return [`${time.toFixed(2)} ${unit}`, ...words].join("  |  ");
};
const addPlayer = (element) => {
  if (!element.layout?.meta?.plays || element.querySelector(":scope > .player")) return;
  const controls = document.createElement("div"), line = document.createElement("div");
  controls.className = "player";
  controls.innerHTML = '<button type="button">play</button>' +
    '<input type="range" min="0" max="1000" step="1" value="0" aria-label="time of the step"><output></output>';
  line.className = "playhead";
  element.style.position = "relative";
  element.append(line, controls);
  const [button, slider, told] = controls.children;
  let running = false, since = 0, from = 0;
  const show = () => {
    const { xaxis, _size: size } = element._fullLayout;
    const [begin, end] = xaxis.range.map(Number);
    const time = begin + (end - begin) * slider.value / 1000;
    line.style.left = `${size.l + xaxis.l2p(time)}px`;
    line.style.top = `${size.t}px`;
    line.style.height = `${size.h}px`;
    line.style.display = running || Number(slider.value) > 0 ? "block" : "none";
    told.textContent = toldAt(element, time);
  };
  const step = (now) => {
    if (!running || !element.isConnected) return;
    since ||= now;
    slider.value = from + 1000 * (now - since) / PLAYED_MS;
    show();
    if (slider.value >= 1000) stop(); else requestAnimationFrame(step);
  };
  const stop = () => { running = false; button.textContent = "play"; show(); };
  button.addEventListener("click", () => {
    if (running) { stop(); return; }
    running = true; since = 0; from = Number(slider.value) >= 1000 ? 0 : Number(slider.value);
    button.textContent = "pause";
    requestAnimationFrame(step);
  });
  slider.addEventListener("input", () => { if (running) stop(); else show(); });
  element.on("plotly_afterplot", show);
  show();
};
