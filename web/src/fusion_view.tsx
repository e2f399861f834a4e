import { useEffect, useState } from "preact/hooks";

import { getJson, told } from "./api";
import type { ServerState } from "./server";

type CellStatus = "fused" | "partial" | "refused" | "none";

interface Cell {
  status: CellStatus;
  notes: string[];
}

interface Layer {
  name: string;
  cells: Cell[];
}

interface Kind {
  module_class: string;
  count: number;
  status: "fused" | "partial" | "kept" | "refused";
  fused: string[];
  left: string[];
}

interface FusionMap {
  implementation: string;
  implementation_reason: string;
  model_class: string | null;
  error: string | null;
  num_linears: number;
  num_fused_linears: number;
  patterns: string[];
  layers: Layer[];
  kinds: Kind[];
}

const MARKS: Record<CellStatus, string> = { fused: "●", partial: "◐", refused: "○", none: "" };
const WORDS: Record<CellStatus, string> = {
  fused: "fused",
  partial: "fused in part",
  refused: "found and left alone",
  none: "not found",
};

export function FusionView({ server }: { server: ServerState }) {
  const [map, setMap] = useState<FusionMap | null>(null);
  const [error, setError] = useState("");
  const isReady = server.state === "ready";
  useEffect(() => {
    if (!isReady) return;
    getJson<FusionMap>("/fusion").then(
      (found) => (setMap(found), setError("")),
      (problem) => setError(told(problem)),
    );
  }, [isReady]);
  if (error) return <p class="error" role="alert">{error}</p>;
  if (map === null) return <p class="muted">{isReady ? "Reading the map…" : "The map is there when the model is."}</p>;
  return (
    <section class="fusion" aria-label="Fusion map">
      <p>
        <b>{map.implementation}</b>: {map.implementation_reason}
      </p>
      {map.error !== null && <p class="error">{map.error}</p>}
      {map.model_class === null ? (
        <p class="muted">Nothing of this model runs in fused layers.</p>
      ) : (
        <p>
          {map.model_class}: {map.num_fused_linears} of {map.num_linears} linear layers run in fused ops.
        </p>
      )}
      {map.layers.length > 0 && map.patterns.length > 0 && <LayerGrid map={map} />}
      {map.kinds.length > 0 && <Kinds kinds={map.kinds} />}
    </section>
  );
}

/** A cell for each layer and pattern. One of them takes part in the order of Tab; arrow keys lead to the others. */
function LayerGrid({ map }: { map: FusionMap }) {
  const [[row, column], setPlace] = useState<[number, number]>([0, 0]);
  const cell = map.layers[row]?.cells[column];
  const move = (event: KeyboardEvent) => {
    const steps: Record<string, [number, number]> = {
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
    };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const [toRow, toColumn] = [row + step[0], column + step[1]];
    const grid = event.currentTarget as HTMLElement;
    grid.querySelector<HTMLElement>(`[data-place="${toRow},${toColumn}"]`)?.focus();
  };
  return (
    <>
      <ul class="legend">
        {(Object.keys(MARKS) as CellStatus[]).map((status) => (
          <li key={status}>
            <span class={`cell ${status}`}>{MARKS[status]}</span> {WORDS[status]}
          </li>
        ))}
      </ul>
      <div class="map-area">
        <div class="scroll">
          <table class="map" role="grid" aria-label="Layers and patterns" onKeyDown={move}>
            <thead>
              <tr>
                <th scope="col">layer</th>
                {map.patterns.map((name) => (
                  <th key={name} scope="col">
                    {name}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {map.layers.map((layer, layerIndex) => (
                <tr key={layer.name}>
                  <th scope="row">{layer.name.split(".").at(-1)}</th>
                  {layer.cells.map((each, index) => {
                    const isCurrent = layerIndex === row && index === column;
                    const place = () => setPlace([layerIndex, index]);
                    return (
                      <td
                        key={index}
                        class={`cell ${each.status}${isCurrent ? " current" : ""}`}
                        data-place={`${layerIndex},${index}`}
                        tabIndex={isCurrent ? 0 : -1}
                        aria-label={WORDS[each.status]}
                        onFocus={place}
                        onPointerEnter={place}
                      >
                        {MARKS[each.status]}
                      </td>
                    );
                  })}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
        <div class="card told" role="status">
          <h2>
            {map.layers[row]?.name}, {map.patterns[column]}
          </h2>
          {cell?.notes.length ? cell.notes.map((note) => <p key={note}>{note}</p>) : <p class="muted">not found</p>}
        </div>
      </div>
    </>
  );
}

function Kinds({ kinds }: { kinds: Kind[] }) {
  return (
    <>
      <h2>Kinds of modules</h2>
      {kinds.map((kind, index) => (
        <details key={index} class="card kind" open={kind.left.length > 0}>
          <summary>
            <b>{kind.module_class}</b> <span class="muted">× {kind.count}</span>{" "}
            <span class={`pill ${kind.status === "fused" ? "ok" : "busy"}`}>{kind.status}</span>
          </summary>
          {kind.fused.map((line, at) => (
            <p key={at}>{line}</p>
          ))}
          {kind.left.map((line, at) => (
            <p key={at} class="muted">
              {line}
            </p>
          ))}
        </details>
      ))}
    </>
  );
}
