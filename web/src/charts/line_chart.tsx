import { useState } from "preact/hooks";

import { WINDOW } from "../history";

export interface Series {
  name: string;
  values: (number | null)[];
}

interface Props {
  title: string;
  note: string;
  format: (value: number) => string;
  series: Series[];
  /** Seconds; as many as each series has values. */
  times: number[];
  /** Whether the areas of the series lie on each other. */
  stacked?: boolean;
  /** The end of the axis, where it is known. */
  most?: number;
}

// The drawing is stretched to its place, and lines keep their width; text is beside it, in HTML.
const [WIDTH, HEIGHT] = [1000, 300];

/** Lines over the last minutes. Values are read by pointer, or with the arrow keys once the chart has the focus. */
export function LineChart({ title, note, format, series, times, stacked = false, most }: Props) {
  const [cursor, setCursor] = useState<number | null>(null);
  const last = times.length - 1;
  const at = cursor === null ? last : Math.min(cursor, last);
  const end = times[last] ?? 0;
  const tops = stacked ? stack(series) : series.map((each) => each.values);
  const top = most ?? niceAbove(Math.max(0, ...tops.flat().map((value) => value ?? 0)));
  const x = (index: number) => WIDTH * (1 - (end - (times[index] ?? 0)) / WINDOW);
  const y = (value: number) => HEIGHT * (1 - value / top);
  const read = (each: Series) => {
    const value = each.values[at] ?? null;
    return value === null ? "–" : format(value);
  };

  const point = (event: PointerEvent) => {
    const { left, width } = (event.currentTarget as Element).getBoundingClientRect();
    const time = end - WINDOW * (1 - (event.clientX - left) / width);
    setCursor(times.reduce((best, each, index) => (Math.abs(each - time) < Math.abs(times[best]! - time) ? index : best), 0));
  };
  const step = (event: KeyboardEvent) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") setCursor(null);
    if (move === undefined) return;
    event.preventDefault();
    setCursor(Math.max(0, Math.min(last, at + move)));
  };

  return (
    <figure
      class="card chart"
      tabIndex={0}
      aria-label={`${title}, ${note}: ${series.map((each) => `${each.name} ${read(each)}`).join(", ")}`}
      onKeyDown={step}
      onBlur={() => setCursor(null)}
    >
      <figcaption>
        <h2>{title}</h2>
        <span class="muted">{cursor === null ? "now" : `${Math.round(end - (times[at] ?? end))} s ago`}</span>
        <p class="muted">{note}</p>
      </figcaption>
      <ul class="legend" aria-live={cursor === null ? "off" : "polite"}>
        {series.map((each, index) => (
          <li key={each.name}>
            <span class={`key s${index}`} /> {each.name} <b>{read(each)}</b>
          </li>
        ))}
      </ul>
      <div class="plot">
        <div class="axis" aria-hidden="true">
          {[top, top / 2, 0].map((value) => (
            <span key={value}>{format(value)}</span>
          ))}
        </div>
        <svg
          viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
          preserveAspectRatio="none"
          aria-hidden="true"
          data-points={times.length}
          onPointerMove={point}
          onPointerLeave={() => setCursor(null)}
        >
          {[0, HEIGHT / 2, HEIGHT].map((height) => (
            <path key={height} class="grid" d={`M0 ${height}H${WIDTH}`} />
          ))}
          {tops
            .map((values, index) => (
              <g key={index} class={`s${index}`}>
                {stacked && <path class="area" d={area(values, x, y)} />}
                <path class="line" d={lines(values, x, y)} />
                <path class="dots" d={dots(values, x, y)} />
              </g>
            ))
            .reverse()}
          {cursor !== null && <path class="cursor" d={`M${x(at)} 0V${HEIGHT}`} />}
        </svg>
      </div>
      <div class="times muted" aria-hidden="true">
        <span>{WINDOW / 60} min ago</span>
        <span>now</span>
      </div>
    </figure>
  );
}

/** Each series on those before it. */
function stack(series: Series[]): (number | null)[][] {
  const sums: (number | null)[][] = [];
  for (const each of series) {
    const below = sums.at(-1);
    sums.push(each.values.map((value, index) => (value === null ? null : value + (below?.[index] ?? 0))));
  }
  return sums;
}

type Scale = (value: number) => number;

/** Stretches of neighbouring values, as points of the drawing. */
function stretches(values: (number | null)[], x: Scale, y: Scale): [number, number][][] {
  const found: [number, number][][] = [[]];
  values.forEach((value, index) => {
    if (value === null) found.push([]);
    else found.at(-1)!.push([x(index), y(value)]);
  });
  return found.filter((points) => points.length > 0);
}

function polyline(points: [number, number][]): string {
  return points.map(([left, top]) => `${left.toFixed(1)} ${top.toFixed(1)}`).join("L");
}

function lines(values: (number | null)[], x: Scale, y: Scale): string {
  return stretches(values, x, y).map((points) => `M${polyline(points)}`).join("");
}

/** Values without neighbours, as the round ends of lines without length. */
function dots(values: (number | null)[], x: Scale, y: Scale): string {
  const alone = stretches(values, x, y).filter((points) => points.length === 1);
  return alone.map((points) => `M${polyline(points)}h0`).join("");
}

function area(values: (number | null)[], x: Scale, y: Scale): string {
  const closed = (points: [number, number][]) => `M${polyline(points)}V${HEIGHT}H${points[0]![0].toFixed(1)}Z`;
  return stretches(values, x, y).map(closed).join("");
}

/** The next of 1, 2, 4, 5, 10, 20 … that is not below the value. */
function niceAbove(value: number): number {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * ([1, 2, 4, 5, 10].find((factor) => factor * unit >= value) ?? 10);
}
