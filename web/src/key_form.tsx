import { useEffect, useRef } from "preact/hooks";

import { keepKey } from "./key";

export function KeyForm({ refused }: { refused: boolean }) {
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => input.current?.focus(), []);
  const send = (event: Event) => {
    event.preventDefault();
    const key = input.current?.value.trim();
    if (key) keepKey(key);
  };
  return (
    <form class="card key" onSubmit={send}>
      <h2>This server asks for an API key</h2>
      {refused && <p class="error" role="alert">The server knows no such key. Check it, and try again.</p>}
      <label for="key">API key</label>
      <input id="key" ref={input} type="password" autocomplete="off" required aria-describedby="key-note" />
      <p id="key-note" class="muted">
        It stays in this tab until the tab is closed, and is sent to this server only.
      </p>
      <button type="submit">Use the key</button>
    </form>
  );
}
