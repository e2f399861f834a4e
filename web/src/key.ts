import { Store } from "./store";

const NAME = "transfuse-api-key";

/**
 * The API key, kept for this tab only.
 *
 * `wanted` says that the server asks for one: because none was shown, or because the one that was shown is none of its.
 */
export interface KeyState {
  key: string | null;
  wanted: boolean;
}

export const keyStore = new Store<KeyState>({ key: sessionStorage.getItem(NAME), wanted: false });

export function keepKey(key: string): void {
  sessionStorage.setItem(NAME, key);
  keyStore.set({ key, wanted: false });
}

export function forgetKey(): void {
  sessionStorage.removeItem(NAME);
  keyStore.set({ key: null, wanted: false });
}

export function wantKey(): void {
  keyStore.set({ ...keyStore.value, wanted: true });
}
