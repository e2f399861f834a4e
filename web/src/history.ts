import { gain, quantile, type Samples } from "./prometheus";
import { Store } from "./store";

/** How long charts look back, in seconds. */
export const WINDOW = 120;
// Latencies are of requests, of which there may be few in a second.
const QUANTILE_WINDOW = 60;

/** What the charts show for one reading of the metrics; null where there was nothing to measure. */
export interface Point {
  time: number;
  outputRate: number | null;
  promptRate: number | null;
  firstTokenMedian: number | null;
  firstTokenP99: number | null;
  gapMedian: number | null;
  gapP99: number | null;
  running: number;
  waiting: number;
  cacheUsage: number;
  cacheHits: number | null;
  stepPrompt: number | null;
  stepOutput: number | null;
}

interface Reading {
  time: number;
  samples: Samples;
}

export const historyStore = new Store<readonly Point[]>([]);
let readings: Reading[] = [];

/** Takes in a reading of the metrics, at a time in seconds. */
export function takeReading(time: number, samples: Samples): void {
  readings = [...readings.filter((reading) => reading.time >= time - QUANTILE_WINDOW), { time, samples }];
  const before = readings.at(-2);
  if (before === undefined) return; // counters tell nothing yet
  const points = historyStore.value.filter((point) => point.time >= time - WINDOW);
  historyStore.set([...points, pointOf(before, { time, samples })]);
}

function pointOf(before: Reading, now: Reading): Point {
  const seconds = now.time - before.time;
  const gained = (name: string) => gain(before.samples, now.samples, `${name}_total`);
  const rate = (name: string) => ratio(gained(name), seconds);
  const oldest = readings[0] ?? before;
  const latency = (name: string, share: number) => quantile(oldest.samples, now.samples, name, share);
  const [steps, tokens, prompt] = ["engine_steps", "engine_step_tokens", "engine_step_prompt_tokens"].map(gained);
  return {
    time: now.time,
    outputRate: rate("generation_tokens"),
    promptRate: rate("engine_step_prompt_tokens"),
    firstTokenMedian: latency("time_to_first_token_seconds", 0.5),
    firstTokenP99: latency("time_to_first_token_seconds", 0.99),
    gapMedian: latency("inter_token_latency_seconds", 0.5),
    gapP99: latency("inter_token_latency_seconds", 0.99),
    running: now.samples.get("num_requests_running") ?? 0,
    waiting: now.samples.get("num_requests_waiting") ?? 0,
    cacheUsage: now.samples.get("kv_cache_usage_perc") ?? 0,
    cacheHits: ratio(gained("prefix_cache_hits"), gained("prefix_cache_queries")),
    stepPrompt: ratio(prompt ?? null, steps ?? null),
    stepOutput: tokens == null || prompt == null ? null : ratio(tokens - prompt, steps ?? null),
  };
}

function ratio(part: number | null, whole: number | null): number | null {
  return part === null || whole === null || whole <= 0 ? null : part / whole;
}
