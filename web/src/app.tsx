import { useEffect, useState } from "preact/hooks";

import { ChatView } from "./chat/chat_view";
import { ChartsView } from "./charts/charts_view";
import { FusionView } from "./fusion_view";
import { forgetKey, keyStore } from "./key";
import { KeyForm } from "./key_form";
import { serverStore, type ServerState } from "./server";
import { useStore } from "./store";

const VIEWS = [
  ["chat", "Chat"],
  ["charts", "Charts"],
  ["fusion", "Fusion map"],
] as const;
type ViewName = (typeof VIEWS)[number][0];

function viewOfAddress(): ViewName {
  return VIEWS.find(([name]) => `#${name}` === location.hash)?.[0] ?? "chat";
}

export function App() {
  const [view, setView] = useState(viewOfAddress);
  const { key, wanted } = useStore(keyStore);
  const server = useStore(serverStore);
  useEffect(() => {
    const follow = () => setView(viewOfAddress());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return (
    <>
      <header>
        <h1>Transfuse</h1>
        <ServerNote server={server} />
        <nav aria-label="Views">
          {VIEWS.map(([name, title]) => (
            <a key={name} href={`#${name}`} aria-current={name === view ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        {key !== null && !wanted && (
          <button type="button" class="quiet" onClick={forgetKey}>
            Forget key
          </button>
        )}
      </header>
      <main>
        {wanted && <KeyForm refused={key !== null} />}
        {/* Kept while something else shows: a conversation is not to be lost by a look at the charts. */}
        <ChatView hidden={wanted || view !== "chat"} server={server} />
        {!wanted && view === "charts" && <ChartsView />}
        {!wanted && view === "fusion" && <FusionView server={server} />}
      </main>
    </>
  );
}

function ServerNote({ server: { state, reason, model } }: { server: ServerState }) {
  return (
    <p class="server" role="status">
      <span class={`pill ${state === "ready" ? "ok" : "busy"}`}>{state}</span>{" "}
      {model !== null && <span title={model.implementation_reason}>{`${model.id} · ${model.implementation}`}</span>}{" "}
      {reason}
    </p>
  );
}
