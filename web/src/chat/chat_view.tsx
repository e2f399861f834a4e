import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import type { ServerState } from "../server";
import { useConversation } from "./conversation";
import type { Exchange } from "./exchange";
import { INITIAL } from "./sampling";
import { SettingsPanel } from "./settings_panel";
import { Turn } from "./turn";

// So near to its end a reader is taken to follow the answer.
const NEAR_PIXELS = 80;

export function ChatView({ hidden, server }: { hidden: boolean; server: ServerState }) {
  const [settings, setSettings] = useState(INITIAL);
  const [draft, setDraft] = useState("");
  const conversation = useConversation();
  const { exchanges, isStreaming } = conversation;
  const log = useFollowing(exchanges);
  const input = useRef<HTMLTextAreaElement>(null);
  const canSend = server.state === "ready" && server.model !== null && !isStreaming && draft.trim() !== "";

  useEffect(() => {
    if (!isStreaming) return;
    const stop = (event: KeyboardEvent) => event.key === "Escape" && conversation.stop();
    addEventListener("keydown", stop);
    return () => removeEventListener("keydown", stop);
  }, [isStreaming]);

  const send = (event: Event) => {
    event.preventDefault();
    if (!canSend || server.model === null) return;
    void conversation.send(draft, server.model.id, settings);
    setDraft("");
    input.current?.focus();
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };

  return (
    <section class="chat" hidden={hidden} aria-label="Chat">
      <SettingsPanel settings={settings} change={setSettings} />
      <div class="conversation">
        <div class="log" ref={log} tabIndex={0} role="region" aria-label="Conversation">
          {exchanges.length === 0 ? (
            <p class="muted empty">Say something to the model. Nothing is kept when this page is closed.</p>
          ) : (
            <ol>
              {exchanges.map((exchange) => (
                <Turn key={exchange.id} exchange={exchange} />
              ))}
            </ol>
          )}
        </div>
        <p class="hidden-text" role="status">
          {announcement(exchanges.at(-1))}
        </p>
        <form class="compose" onSubmit={send}>
          <label for="message" class="hidden-text">
            Message
          </label>
          <textarea
            id="message"
            ref={input}
            rows={2}
            placeholder="Message (Enter sends, Shift+Enter begins a line)"
            value={draft}
            onInput={(event) => setDraft(event.currentTarget.value)}
            onKeyDown={onKey}
          />
          <div class="buttons">
            {isStreaming ? (
              <button type="button" class="stop" onClick={conversation.stop}>
                Stop
              </button>
            ) : (
              <button type="submit" disabled={!canSend}>
                Send
              </button>
            )}
            <button type="button" class="quiet" disabled={exchanges.length === 0} onClick={conversation.clear}>
              New chat
            </button>
          </div>
        </form>
      </div>
    </section>
  );
}

/** What is read out: that an answer grows, and that it has ended; not every word of it. */
function announcement(exchange: Exchange | undefined): string {
  if (exchange === undefined) return "";
  return { streaming: "Answering", done: "The answer is complete", stopped: "Stopped", failed: "" }[exchange.state];
}

/** Keeps the end of the log in sight, unless its reader has scrolled away from it. */
function useFollowing(exchanges: readonly Exchange[]) {
  const log = useRef<HTMLDivElement>(null);
  const isFollowing = useRef(true);
  useEffect(() => {
    const element = log.current;
    if (element === null) return;
    const watch = () => {
      isFollowing.current = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_PIXELS;
    };
    element.addEventListener("scroll", watch, { passive: true });
    return () => element.removeEventListener("scroll", watch);
  }, []);
  useLayoutEffect(() => {
    if (isFollowing.current) log.current?.scrollTo({ top: log.current.scrollHeight });
  }, [exchanges]);
  return log;
}
