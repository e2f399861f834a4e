import { historyStore, type Point } from "../history";
import { useStore } from "../store";
import { LineChart, type Series } from "./line_chart";

interface Chart {
  title: string;
  note: string;
  format: (value: number) => string;
  series: [name: string, read: (point: Point) => number | null][];
  stacked?: boolean;
  most?: number;
}

const number = (value: number) => (value >= 100 ? value.toFixed(0) : `${Number(value.toPrecision(2))}`);
const seconds = (value: number) => (value < 1 ? `${number(value * 1000)} ms` : `${value.toFixed(1)} s`);
const percent = (value: number) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;

const CHARTS: Chart[] = [
  {
    title: "Throughput",
    note: "tokens per second",
    format: number,
    series: [
      ["generated", (point) => point.outputRate],
      ["of prompts", (point) => point.promptRate],
    ],
  },
  {
    title: "Time to first token",
    note: "of the last minute's requests",
    format: seconds,
    series: [
      ["median", (point) => point.firstTokenMedian],
      ["99th percentile", (point) => point.firstTokenP99],
    ],
  },
  {
    title: "Time between tokens",
    note: "of the last minute's tokens",
    format: seconds,
    series: [
      ["median", (point) => point.gapMedian],
      ["99th percentile", (point) => point.gapP99],
    ],
  },
  {
    title: "Requests",
    note: "at the moment",
    format: number,
    series: [
      ["running", (point) => point.running],
      ["waiting", (point) => point.waiting],
    ],
  },
  {
    title: "Cache",
    note: "blocks in use; prompt tokens found in it",
    format: percent,
    most: 1,
    series: [
      ["in use", (point) => point.cacheUsage],
      ["prefix hits", (point) => point.cacheHits],
    ],
  },
  {
    title: "Batch mix",
    note: "tokens in a step, on average",
    format: number,
    stacked: true,
    series: [
      ["generated", (point) => point.stepOutput],
      ["of prompts", (point) => point.stepPrompt],
    ],
  },
];

export function ChartsView() {
  const points = useStore(historyStore);
  const times = points.map((point) => point.time);
  return (
    <section class="charts" aria-label="Charts">
      {CHARTS.map((chart) => {
        const series: Series[] = chart.series.map(([name, read]) => ({ name, values: points.map(read) }));
        return <LineChart key={chart.title} {...chart} series={series} times={times} />;
      })}
    </section>
  );
}
