import { ApiError, getJson, getReadiness, getText, told } from "./api";
import { takeReading } from "./history";
import { keyStore } from "./key";
import { readSamples } from "./prometheus";
import { Store } from "./store";

const POLL_MILLISECONDS = 1000;

/** How the server is: `state` as `/ready` says it, or `connecting` or `unreachable`. */
export interface ServerState {
  state: string;
  reason: string;
  model: Model | null;
}

export interface Model {
  id: string;
  max_model_len: number;
  implementation: string;
  implementation_reason: string;
}

export const serverStore = new Store<ServerState>({ state: "connecting", reason: "", model: null });

/** Reads the server's metrics every second from now on, while somebody looks and a key is not waited for. */
export function startWatching(): void {
  const tick = async () => {
    if (!document.hidden && !keyStore.value.wanted) await look();
    setTimeout(tick, POLL_MILLISECONDS);
  };
  void tick();
}

async function look(): Promise<void> {
  try {
    const samples = readSamples(await getText("/metrics"));
    takeReading(performance.now() / 1000, samples);
    const { model } = serverStore.value;
    if (samples.get("engine_ready") !== 1) {
      const { status, reason } = await getReadiness();
      serverStore.set({ state: status, reason, model });
    } else if (model === null || serverStore.value.state !== "ready") {
      // A server that was away may have come back with another model.
      const { data } = await getJson<{ data: Model[] }>("/v1/models");
      serverStore.set({ state: "ready", reason: "", model: data[0] ?? null });
    }
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return; // the page asks for a key
    serverStore.set({ ...serverStore.value, state: "unreachable", reason: told(error) });
  }
}
